"""Traces: one file a format beside this one, one line each in `plugins.py`.

The contract of a format is one function, `read(source) -> Trace`. It looks at the beginning of the source, raises
NotThisFormatError where that is not its own, and from then on raises TraceError with file and line (`source.error`) for
anything that it cannot take. `assembly.build_trace` numbers, checks and digests what it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvaudit import plugins
from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.source import NotThisFormatError, TraceSource, open_source

__all__ = ["NotThisFormatError", "Reader", "TraceSource", "read_trace"]

Reader = Callable[[TraceSource], Trace]


def read_trace(path: Path, format: str | None = None) -> Trace:  # noqa: A002
    """Read a trace: plain, gzip or zstd, told by its content. `-` is standard input.

    Without `format`, each trace format is tried in turn. Raises TraceError with file and line for a trace that cannot
    be read, UsageError for an unknown format.
    """
    with open_source(path) as source:
        if source.is_empty():
            raise TraceError(f"{source.name} is empty", "a trace is JSON lines: one object a line")
        if format is None:
            return _detected(source)
        try:
            return _reader(format)(source)
        except NotThisFormatError as refusal:
            raise TraceError(f"{source.name} is not a {format} trace: {refusal.message}") from refusal


def _reader(name: str) -> Reader:
    reader: Reader = plugins.load("traces", name)
    return reader


def _detected(source: TraceSource) -> Trace:
    refusals: dict[str, str] = {}
    for name in plugins.available("traces"):
        try:
            return _reader(name)(source)
        except NotThisFormatError as refusal:
            refusals[name] = refusal.message
    reasons = set(refusals.values())
    why = reasons.pop() if len(reasons) == 1 else "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    raise TraceError(f"{source.name} is in no known trace format: {why}", f"tried: {', '.join(refusals)}")
