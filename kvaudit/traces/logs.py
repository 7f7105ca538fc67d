"""Files of logged calls as records: JSON lines, a JSON array, one whole JSON document or Parquet, told by content."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from kvaudit.errors import TraceError
from kvaudit.traces.decompress import CutShortError
from kvaudit.traces.parquet import damage_told, is_parquet, open_parquet
from kvaudit.traces.source import NotThisFormatError, TraceSource, is_blank
from kvaudit.traces.tally import LeftOut, Tally

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_DOCUMENT = 1 << 28
"""Bytes of a JSON file that is not made of lines: it is held in memory as a whole."""

LINE, ENTRY, ROW = "line", "entry", "row"

_FIRST_KEY = re.compile(rb'\s*\{\s*"((?:[^"\\]|\\.){0,200})"\s*:')
_ARRAY = re.compile(rb"\s*\[\s*[{\]]")
_HEAD = 1 << 16
_FIRST_ENTRY = 1 << 12
"""Bytes of an array in which its first entry is looked for, doubled until it is found."""
_UNREADABLE_AT_FIRST = 100
"""Lines that cannot be read, behind which no first record is looked for."""

Record = dict[str, Any]


class Log:
    """`records` gives (place from 1, record).

    `tally` counts what is left out of them: here those that cannot be read. It is whole when they have been taken.
    """

    def __init__(self, unit: str, records: Iterator[tuple[int, Record]], tally: Tally | None = None) -> None:
        self.records = records
        self.tally = tally or Tally(unit)


def read_log(source: TraceSource) -> Log:
    """The records of JSON lines, of a JSON array or of Parquet; one object over several lines is one record.

    Lines that cannot be read are left out, and of a compressed file that is cut off what stands before that is read.
    Raises TraceError, also while records are taken, and behind the last of them where fewer can be read than cannot.
    """
    if is_parquet(source):
        return Log(ROW, _rows(source))
    if _is_array(source):
        tally = Tally(ENTRY)
        return Log(ENTRY, _entries(source, tally), tally)
    spread, tally = _spread_object(source), Tally(LINE)
    return Log(LINE, _line_records(source, tally) if spread is None else iter([(1, spread)]), tally)


def first_record(source: TraceSource) -> Record:
    """The first record that can be read, for readers to tell their format by.

    Raises NotThisFormatError where there is none.
    """
    if is_parquet(source):
        return next((row for _, row in _rows(source)), {})
    if _is_array(source):
        return _first_entry(source)
    return _spread_object(source) or _first_object(source)


def _first_object(source: TraceSource) -> Record:
    first_refusal: TraceError | None = None
    for number, line in islice(_lines(source), _UNREADABLE_AT_FIRST + 1):
        try:
            return source.object_of(number, line)
        except TraceError as refusal:
            if first_refusal is None and line.lstrip().startswith(b"{") and _is_whole(source):
                raise NotThisFormatError("it is one JSON document over several lines") from refusal
            first_refusal = first_refusal or refusal
    if first_refusal is None:
        raise NotThisFormatError("it is empty")
    raise NotThisFormatError(first_refusal.message.removeprefix(f"{source.name}, "), first_refusal.hint)


def _line_records(source: TraceSource, tally: Tally) -> Iterator[tuple[int, Record]]:
    readable = unreadable = 0
    first_refusal: TraceError | None = None
    for number, line in _lines(source, tally):
        try:
            record = source.object_of(number, line)
        except TraceError as refusal:
            first_refusal, unreadable = first_refusal or refusal, unreadable + 1
            reason, _, detail = refusal.message.removeprefix(f"{source.name}, line {number}: ").partition(" at ")
            tally.add(LeftOut(number, reason, detail))
        else:
            readable += 1
            yield number, record
    if first_refusal is not None and unreadable > readable:
        lines = readable + unreadable
        counted = f" ({unreadable:,} of {lines:,} lines cannot be read)" if lines > 1 else ""
        raise TraceError(first_refusal.message + counted, first_refusal.hint)


def _lines(source: TraceSource, tally: Tally | None = None) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, up to the end or to where a compressed file is cut off, which `tally` notes."""
    number = 0
    try:
        for number, line in source.lines():
            if not is_blank(line):
                yield number, line
    except TraceError as error:
        if not isinstance(error.__cause__, CutShortError):
            raise
        if tally is not None:
            tally.notes.append(f"the compressed file is cut off behind line {number}: what stands before that is read")


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
    found = _FIRST_KEY.match(_head(_lines(source), _HEAD))
    return None if found is None else found[1].decode(errors="replace")


def whole_document(source: TraceSource) -> Any:
    """The one JSON value that a file holds.

    Raises NotThisFormatError where there are several, one a line, and TraceError where it is broken or too large.
    """
    content = _head(source.lines(), LARGEST_DOCUMENT + 1)
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
    first, second = _first_two(source)
    if second is None:
        return True
    return not _is_object(first) and (not _is_object(second) or _is_whole(source))


def _spread_object(source: TraceSource) -> Record | None:
    """The object of a file whose first line only opens it, as printing for people does; None for any other file."""
    if _first_two(source)[0].strip() != b"{":
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


def _first_two(source: TraceSource) -> tuple[bytes, bytes | None]:
    lines = (line for _, line in _lines(source))
    return next(lines, b""), next(lines, None)


def _is_whole(source: TraceSource) -> bool:
    try:
        whole_document(source)
    except TraceError:
        return False
    return True


def _head(lines: Iterable[tuple[int, bytes]], size: int) -> bytes:
    """The first of the lines, at least `size` bytes where there are as many."""
    parts, length = [], 0
    for _, line in lines:
        parts.append(line)
        length += len(line)
        if length >= size:
            break
    return b"".join(parts)


def _is_array(source: TraceSource) -> bool:
    """Whether the file is one array of objects, not lines of which the first begins with a bracket."""
    if not _ARRAY.match(_head(_lines(source), _FIRST_ENTRY)):
        return False
    _, second = _first_two(source)
    return second is None or not _is_object(second) or _is_whole(source)


def _entries(source: TraceSource, tally: Tally) -> Iterator[tuple[int, Record]]:
    document = whole_document(source)
    entries = document if type(document) is list else []
    others = [place for place, entry in enumerate(entries, start=1) if type(entry) is not dict]
    if 2 * len(others) > len(entries):
        raise TraceError(f"{source.name}, entry {others[0]}: not a JSON object")
    for place in others:
        tally.add(LeftOut(place, "not a JSON object"))
    yield from ((place, entry) for place, entry in enumerate(entries, start=1) if type(entry) is dict)


def _first_entry(source: TraceSource) -> Record:
    size, before = _FIRST_ENTRY, -1
    while True:
        head = _head(_lines(source), size)[: max(size, _FIRST_ENTRY)]
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


def _rows(source: TraceSource) -> Iterator[tuple[int, Record]]:
    import pyarrow as pa

    file, number = open_parquet(source), 0
    with damage_told(source):
        for batch in file.iter_batches(batch_size=256):
            for row in pa.Table.from_batches([_in_microseconds(batch)]).to_pylist():
                number += 1
                yield number, row


def _in_microseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nanoseconds, which `datetime` cannot hold, are cut off."""
    import pyarrow as pa

    columns = [
        column.cast(pa.timestamp("us", column.type.tz), safe=False) if pa.types.is_timestamp(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
