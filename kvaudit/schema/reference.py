"""The reference of a run's tables as a page, made from the schema itself, and the queries that run on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

import pyarrow as pa

from kvaudit.schema import QUERIES, SCHEMA_VERSION
from kvaudit.schema.footer import FOOTER
from kvaudit.schema.metrics import METRICS
from kvaudit.schema.tables import DOCUMENTED, Table
from kvaudit.schema.values import VALUES


def queries() -> str:
    """The content of `queries.sql`: DuckDB queries that run inside a run folder, each under a line `-- name: NAME`."""
    return files("kvaudit.schema").joinpath(QUERIES).read_text(encoding="utf-8")


def as_markdown(level: int = 1) -> str:
    """The reference page: tables, columns, words, figures, footer. `level` is that of its heading, from 1 to 4."""
    return "\n".join(_lines("#" * level)) + "\n"


def files_of(name: str) -> str:
    """Where a table's files stand in a run folder: one file, or a pattern where every arm has a file of its own."""
    return f"{name}/*.parquet" if DOCUMENTED[name].by_arm else f"{name}.parquet"


def type_name(kind: pa.DataType) -> str:
    """A column's type as Arrow calls it, the same in every version of Arrow."""
    if pa.types.is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{field.name}: {type_name(field.type)}' for field in kind)}>"
    return str(kind)


def _lines(heading: str) -> Iterator[str]:
    yield f"{heading} Tables of a kvaudit run"
    yield ""
    yield (
        f"Schema version {SCHEMA_VERSION}. A run is a folder: `manifest.json` says what was run, and every table below "
        "is Parquet. Columns are always present, in this order and with these types. Times are in milliseconds, "
        'log-probabilities in nats. In SQL put the names `order`, `left`, `right` and `end` in "quotes".'
    )
    for name, table in DOCUMENTED.items():
        yield from _table(f"{heading}#", name, table)
    yield from _section(f"{heading}#", "Words that columns hold")
    rows = [(f"`{column}`", word, says) for column, words in VALUES.items() for word, says in words.items()]
    yield from _rows(("column", "word", "meaning"), rows)
    yield from _section(f"{heading}#", "Figures of `summary`")
    yield from _rows(
        ("metric", "a row for each", "value, low and high"),
        [(f"`{name}`", metric.row, metric.value) for name, metric in METRICS.items()],
    )
    yield from _section(f"{heading}#", "Footer of every file")
    yield from _rows(("key", "value"), [(f"`{key}`", says) for key, says in FOOTER.items()])


def _table(heading: str, name: str, table: Table) -> Iterator[str]:
    yield from _section(heading, f"`{name}`")
    yield f"`{files_of(name)}`. A row is {table.row}."
    yield ""
    yield from _rows(
        ("column", "type", "null", "meaning"),
        [
            (
                f"`{column.name}`",
                f"`{type_name(column.type)}`",
                "may be" if column.nullable else "never",
                column.meaning,
            )
            for column in table.columns
        ],
    )


def _section(heading: str, title: str) -> tuple[str, ...]:
    return "", f"{heading} {title}", ""


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        escaped = [cell.replace("|", r"\|") for cell in cells]
        yield f"| {' | '.join(escaped)} |"
