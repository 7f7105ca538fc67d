"""Event tables as rows of text: CSV, JSON lines or Parquet, told by their content. Values stay as they are written."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from kvaudit.errors import TraceError, UsageError
from kvaudit.traces.parquet import damage_told, is_parquet, open_parquet
from kvaudit.traces.source import TraceSource, is_blank

if TYPE_CHECKING:
    import pyarrow as pa

TextRow = dict[str, str]


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` in their order. `rows` gives (line or row number from 1, value of each column as text)."""

    source: TraceSource
    columns: tuple[str, ...]
    rows: Iterator[tuple[int, TextRow]]
    unit: Literal["line", "row"] = "line"

    def error(self, number: int, what: str, hint: str | None = None) -> TraceError:
        return TraceError(f"{self.source.name}, {self.unit} {number}: {what}", hint)

    def require(self, column: str, option: str) -> None:
        """Raises UsageError where the table lacks a column that an option names."""
        if column not in self.columns:
            raise UsageError(
                f"{option} names the column {column!r}, which {self.source.name} does not have",
                f"columns: {', '.join(self.columns)}",
            )


def read_table(source: TraceSource) -> Table:
    """Raises TraceError, also while rows are taken, for a table that cannot be read."""
    if is_parquet(source):
        return _parquet(source)
    first = next((line for _, line in source.lines() if not is_blank(line)), b"")
    if not first:
        raise TraceError(f"{source.name} is empty", "an event table is CSV, JSON lines or Parquet")
    return _json_lines(source) if first.lstrip().startswith(b"{") else _csv(source)


def _csv(source: TraceSource) -> Table:
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_text_lines(source), strict=True)
    records = _records(source, reader)
    _, header = next(records)
    columns = _checked(source, header)

    def rows() -> Iterator[tuple[int, TextRow]]:
        for number, record in records:
            if len(record) != len(columns):
                raise source.error(number, f"{len(record)} fields, and the header has {len(columns)}")
            yield number, dict(zip(columns, record, strict=True))

    return Table(source, columns, rows())


def _text_lines(source: TraceSource) -> Iterator[str]:
    for number, line in source.lines():
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise source.error(number, f"not UTF-8 at byte {error.start + 1}") from error


def _records(source: TraceSource, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """(line on which it ends, fields) of every record that is not blank."""
    try:
        for record in reader:
            if record:
                yield reader.line_num, record
    except csv.Error as error:
        raise source.error(reader.line_num, f"broken CSV: {error}") from error


def _checked(source: TraceSource, names: list[str]) -> tuple[str, ...]:
    if not names:
        raise TraceError(f"{source.name} has no columns", "an event table needs at least one")
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise TraceError(f"{source.name} has the column {twice!r} twice")
    return tuple(names)


def _json_lines(source: TraceSource) -> Table:
    columns = _checked(source, list(source.first_object()))

    def rows() -> Iterator[tuple[int, TextRow]]:
        for number, values in source.objects():
            yield number, {column: _text(values.get(column)) for column in columns}

    return Table(source, columns, rows())


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    return "" if value is None else orjson.dumps(value, default=str).decode()


def _parquet(source: TraceSource) -> Table:
    file = open_parquet(source)
    with damage_told(source):
        columns = _checked(source, file.schema_arrow.names)

    def rows() -> Iterator[tuple[int, TextRow]]:
        number = 0
        with damage_told(source):
            for batch in file.iter_batches():
                texts = [_texts(column) for column in batch.columns]
                for record in zip(*texts, strict=True):
                    number += 1
                    yield number, dict(zip(columns, record, strict=True))

    return Table(source, columns, rows(), "row")


def _texts(column: pa.Array) -> list[str]:
    """Numbers in their shortest form, dates and times as ISO 8601 with a space, no value as nothing."""
    import pyarrow as pa

    if pa.types.is_timestamp(column.type):
        moments = column.cast(pa.timestamp("us", column.type.tz), safe=False).to_pylist()
        return ["" if moment is None else moment.isoformat(" ") for moment in moments]
    try:
        return [text or "" for text in column.cast(pa.string()).to_pylist()]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return [_text(value) for value in column.to_pylist()]
