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

_FIELDS_SHOWN, _LONGEST_FIELD = 6, 40


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
    if source.is_empty():
        raise TraceError(f"{source.name} is empty", "a trace is JSON lines: one object a line")
    if format is None:
        return _detected(source)
    try:
        return format, _reader(format)(source)
    except NotThisFormatError as refusal:
        raise TraceError(f"{source.name} is not a {format} trace: {refusal.message}") from refusal


def _reader(name: str) -> Reader:
    reader: Reader = plugins.load("traces", name)
    return reader


def _detected(source: TraceSource) -> tuple[str, Trace]:
    refusals: dict[str, str] = {}
    for name in _names():
        try:
            return name, _reader(name)(source)
        except NotThisFormatError as refusal:
            refusals[name] = refusal.message
    raise UnknownFormatError(
        f"{source.name} is in no known trace format: {_why_unknown(source, refusals)}", f"tried: {', '.join(refusals)}"
    )


def _names() -> Iterator[str]:
    """Formats from outside are looked for only where none of kvaudit's own takes a file."""
    own = plugins.BUILT_IN["traces"]
    yield from own
    yield from (name for name in plugins.available("traces") if name not in own)


def _why_unknown(source: TraceSource, refusals: Mapping[str, str]) -> str:
    try:
        fields = [repr(name[:_LONGEST_FIELD]) for name in source.first_object()]
    except NotThisFormatError as refusal:
        found = refusal.message
    else:
        more = f" and {len(fields) - _FIELDS_SHOWN} more" if len(fields) > _FIELDS_SHOWN else ""
        found = f"the first line has the fields {', '.join(fields[:_FIELDS_SHOWN])}{more}" if fields else "no fields"
    from_outside = [f"; {name}: {why}" for name, why in refusals.items() if name not in plugins.BUILT_IN["traces"]]
    return found + "".join(from_outside)
