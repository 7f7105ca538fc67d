"""A folder to publish: a run folder with fresh figures that is a Hugging Face dataset as well, one config a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from kvaudit.reports.parquet.card import dataset_card
from kvaudit.schema import QUERIES, TABLES
from kvaudit.schema.footer import footer
from kvaudit.schema.reference import as_markdown, files_of, queries

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit
    from kvaudit.reports import RunParts

MOST_ROWS = 10_000
MOST_BYTES = 16_000_000
"""Of a row group, in memory: viewers read one to show a page. A single row may be larger."""


def write(audit: Audit, run: RunParts, folder: Path) -> None:
    """Write the run's tables, the audit's `comparisons` and `summary`, its manifest, queries.sql, schema.md and a
    dataset card into `folder`, which is empty. Holds one part of a table in memory at a time.

    `kvaudit.store.open_run` reads the folder. Raises OSError where it cannot be written.
    """
    rows: dict[str, int] = {}
    for name in TABLES:
        for place, part in _parts(audit, run, name):
            _write_part(folder / place, name, part, audit)
            rows[name] = rows.get(name, 0) + part.num_rows
            del part  # the next one must not stand in memory beside it
    manifest = orjson.dumps(dict(audit.manifest), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    (folder / "manifest.json").write_bytes(manifest)
    _write_text(folder / QUERIES, queries())
    _write_text(folder / "schema.md", as_markdown())
    _write_text(folder / "README.md", dataset_card(audit, rows))


def _parts(audit: Audit, run: RunParts, name: str) -> Iterator[tuple[str, pa.Table]]:
    """A table's parts. What the audit made of the run is taken from the audit, references only where there are any."""
    if name == "comparisons":
        yield files_of(name), audit.comparisons
    elif name == "summary":
        yield files_of(name), audit.summary
    elif name != "references" or _has_references(audit):
        yield from run.parts(name)


def _has_references(audit: Audit) -> bool:
    reference = audit.grid.reference
    return reference is not None and audit.arms[reference].finished


def _write_part(path: Path, name: str, part: pa.Table, audit: Audit) -> None:
    path.parent.mkdir(exist_ok=True)
    marks = footer(name, audit.manifest["trace"]["digest"], audit.manifest["settings_digest"])
    schema = TABLES[name].with_metadata(marks)
    with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True, write_page_index=True) as writer:
        for group in _row_groups(part):
            writer.write_table(group, row_group_size=max(1, group.num_rows))


def _row_groups(part: pa.Table) -> Iterator[pa.Table]:
    for start in range(0, part.num_rows, MOST_ROWS):
        yield from _halved(part.slice(start, MOST_ROWS))


def _halved(rows: pa.Table) -> Iterator[pa.Table]:
    if rows.num_rows == 1 or rows.nbytes <= MOST_BYTES:
        yield rows
    else:
        middle = rows.num_rows // 2
        yield from _halved(rows.slice(0, middle))
        yield from _halved(rows.slice(middle))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
