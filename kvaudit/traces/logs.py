"""Files of logged calls as records: JSON lines, a JSON array, one whole JSON document or Parquet, told by content."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from kvaudit.errors import TraceError
from kvaudit.traces.source import NotThisFormatError, TraceSource, is_blank

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_DOCUMENT = 1 << 28
"""Bytes of a JSON file that is not made of lines: it is held in memory as a whole."""

LINE, ENTRY, ROW = "line", "entry", "row"

_PARQUET = b"PAR1"
_FIRST_KEY = re.compile(rb'\s*\{\s*"((?:[^"\\]|\\.){0,200})"\s*:')
_HEAD = 1 << 16
_FIRST_ENTRY = 1 << 12
"""Bytes of an array in which its first entry is looked for, doubled until it is found."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Log:
    """`records` gives (place from 1, record); `unit` is what a place counts."""

    unit: str
    records: Iterator[tuple[int, Record]]


def read_log(source: TraceSource) -> Log:
    """The records of JSON lines, of a JSON array or of Parquet; one object over several lines is one record.

    Raises TraceError, also while they are taken.
    """
    if _is_parquet(source):
        return Log(ROW, _rows(source))
    if _begins_with(source, b"["):
        return Log(ENTRY, _entries(source))
    spread = _spread_object(source)
    return Log(LINE, source.objects() if spread is None else iter([(1, spread)]))


def first_record(source: TraceSource) -> Record:
    """The first record, for readers to tell their format by. Raises NotThisFormatError where there is none."""
    if _is_parquet(source):
        return next((row for _, row in _rows(source)), {})
    if _begins_with(source, b"["):
        return _first_entry(source)
    return _spread_object(source) or source.first_object()


def document_beginning_with(source: TraceSource, keys: Collection[str]) -> Any:
    """The document of a file that is one, not JSON lines, and whose first key is one of `keys`.

    Raises NotThisFormatError for any other file, TraceError for one that is broken or too large.
    """
    key = first_key(source)
    if key not in keys:
        raise NotThisFormatError(f"it is no JSON document that begins with {' or '.join(map(repr, keys))}")
    if not is_document(source):
        raise NotThisFormatError("it is made of lines")
    return whole_document(source)


def first_key(source: TraceSource) -> str | None:
    """The first key of a JSON document, wherever its lines end; None for anything else."""
    found = _FIRST_KEY.match(_head(source, _HEAD))
    return None if found is None else found[1].decode(errors="replace")


def whole_document(source: TraceSource) -> Any:
    """The one JSON value that a file holds.

    Raises NotThisFormatError where there are several, one a line, and TraceError where it is broken or too large.
    """
    content = _head(source, LARGEST_DOCUMENT + 1)
    if len(content) > LARGEST_DOCUMENT:
        raise TraceError(
            f"{source.name} is one JSON document of more than {LARGEST_DOCUMENT >> 20} MiB",
            "split it, or convert it to JSON lines",
        )
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if _is_object(next((line for line in content.splitlines(keepends=True) if not is_blank(line)), b"")):
            raise NotThisFormatError("it is made of lines") from error
        raise source.error(error.lineno, f"broken JSON at column {error.colno}: {error.msg}") from error


def is_document(source: TraceSource) -> bool:
    """Whether the file is one JSON object that may go over several lines, not JSON lines."""
    objects = (line for _, line in source.lines() if not is_blank(line))
    first, second = next(objects, b""), next(objects, None)
    return second is None or not _is_object(first)


def _spread_object(source: TraceSource) -> Record | None:
    """The object of a file whose first line only opens it, as printing for people does; None for any other file."""
    if next((line for _, line in source.lines() if not is_blank(line)), b"").strip() != b"{":
        return None
    try:
        found = whole_document(source)
    except TraceError:
        return None
    return found if type(found) is dict else None


def _is_object(line: bytes) -> bool:
    try:
        return type(orjson.loads(line)) is dict
    except orjson.JSONDecodeError:
        return False


def _head(source: TraceSource, size: int) -> bytes:
    """The first bytes of the content, at least `size` where there are as many, up to the end of a line."""
    parts, length = [], 0
    for _, line in source.lines():
        parts.append(line)
        length += len(line)
        if length >= size:
            break
    return b"".join(parts)


def _begins_with(source: TraceSource, start: bytes) -> bool:
    return next((line for _, line in source.lines() if not is_blank(line)), b"").lstrip().startswith(start)


def _entries(source: TraceSource) -> Iterator[tuple[int, Record]]:
    document = whole_document(source)
    for place, entry in enumerate(document if type(document) is list else [], start=1):
        if type(entry) is not dict:
            raise TraceError(f"{source.name}, entry {place}: not a JSON object")
        yield place, entry


def _first_entry(source: TraceSource) -> Record:
    size, before = _FIRST_ENTRY, -1
    while True:
        head = _head(source, size)[: max(size, _FIRST_ENTRY)]
        try:
            entry, _ = json.JSONDecoder().raw_decode(head.lstrip()[1:].lstrip().decode(errors="ignore"))
        except (ValueError, RecursionError) as error:
            if len(head) == before or size > LARGEST_DOCUMENT:
                raise NotThisFormatError("it is an array without a first object") from error
            size, before = size * 8, len(head)
            continue
        if type(entry) is not dict:
            raise NotThisFormatError("it is an array of something else than objects")
        return entry


def _is_parquet(source: TraceSource) -> bool:
    with source.path.open("rb") as stream:
        return stream.read(len(_PARQUET)) == _PARQUET


def _rows(source: TraceSource) -> Iterator[tuple[int, Record]]:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(source.path).iter_batches(batch_size=256):
            for row in pa.Table.from_batches([_in_microseconds(batch)]).to_pylist():
                number += 1
                yield number, row
    except (OSError, OverflowError, ValueError, NotImplementedError, pa.ArrowException) as error:
        raise TraceError(f"{source.name} cannot be read as Parquet: {error}") from error


def _in_microseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nanoseconds, which `datetime` cannot hold, are cut off."""
    import pyarrow as pa

    columns = [
        column.cast(pa.timestamp("us", column.type.tz), safe=False) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
