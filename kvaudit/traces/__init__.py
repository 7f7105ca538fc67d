"""Traces: one file a format beside this one, one line each in `plugins.py`.

The contract of a format is one function, `read(source) -> Trace`. It looks at the beginning of the source, raises
NotThisFormatError where that is not its own, and from then on raises TraceError with file and line (`source.error`) for
anything that it cannot take; formats of other tools leave single records out and say so (`foreign.py`).
`assembly.build_trace` numbers, checks and digests what it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvaudit import plugins
from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.fields import brief
from kvaudit.traces.packing import HEAD_BYTES, Packing, packing_of
from kvaudit.traces.source import NotThisFormatError, TraceSource, open_source

__all__ = [
    "NotThisFormatError",
    "Reader",
    "TraceSource",
    "UnknownFormatError",
    "read_as",
    "read_source",
    "read_trace",
]

Reader = Callable[[TraceSource], Trace]

_FIELDS_SHOWN = 6


class UnknownFormatError(TraceError):
    """A file that no trace format takes."""


def read_trace(path: Path, format: str | None = None) -> Trace:  # noqa: A002
    """Read a trace: plain, gzip or zstd, told by its content. `-` is standard input.

    Without `format`, each trace format is tried in turn. What a log of others holds beside requests is left out; the
    header's `left_out` and `notes` say so. Raises TraceError with file and line for a trace that cannot be read,
    UsageError for an unknown format.
    """
    with open_source(path) as source:
        return read_source(source, format)


def read_source(source: TraceSource, format: str | None = None) -> Trace:  # noqa: A002
    """As `read_trace`, of a source that is open."""
    return read_as(source, format)[1]


def read_as(source: TraceSource, format: str | None = None) -> tuple[str, Trace]:  # noqa: A002
    """As `read_source`, with the name of the format that the trace has."""
    packing = packing_of(source.head(HEAD_BYTES))
    if packing is None and source.is_empty():
        raise TraceError(f"{source.name} is empty", "a trace is JSON lines: one object a line")
    if format is None:
        return _detected(source, packing)
    if packing and format in plugins.BUILT_IN["traces"]:
        raise _packed(source, packing)
    try:
        return format, _reader(format)(source)
    except NotThisFormatError as refusal:
        raise TraceError(f"{source.name} is not a {format} trace: {refusal.message}") from refusal


def _reader(name: str) -> Reader:
    reader: Reader = plugins.load("traces", name)
    return reader


def _detected(source: TraceSource, packing: Packing | None) -> tuple[str, Trace]:
    refusals: dict[str, str] = {}
    for name in _from_outside() if packing else (*plugins.BUILT_IN["traces"], *_from_outside()):
        try:
            return name, _reader(name)(source)
        except NotThisFormatError as refusal:
            refusals[name] = refusal.message
    raise _packed(source, packing) if packing else _unknown(source, refusals)


def _from_outside() -> Iterator[str]:
    """Looked for only where none of kvaudit's own formats takes a file."""
    yield from (name for name in plugins.available("traces") if name not in plugins.BUILT_IN["traces"])


def _packed(source: TraceSource, packing: Packing) -> UnknownFormatError:
    return UnknownFormatError(f"{source.name} is {packing.what}: {packing.remedy}")


def _unknown(source: TraceSource, refusals: Mapping[str, str]) -> UnknownFormatError:
    try:
        fields = list(source.first_object())
    except NotThisFormatError as refusal:
        found = refusal.message
    else:
        if "exchange" in fields:
            return UnknownFormatError(
                f"{source.name} holds exchanges of a capture, and lacks the header that a capture begins with",
                'write the line {"kvaudit_capture": 1} before its first line',
            )
        names = ", ".join(map(brief, fields[:_FIELDS_SHOWN]))
        more = f" and {len(fields) - _FIELDS_SHOWN} more" if len(fields) > _FIELDS_SHOWN else ""
        found = f"the first line has the fields {names}{more}" if fields else "no fields"
    told = [f"; {name}: {why}" for name, why in refusals.items() if name not in plugins.BUILT_IN["traces"]]
    return UnknownFormatError(
        f"{source.name} is in no known trace format: {found}{''.join(told)}", f"tried: {', '.join(refusals)}"
    )
