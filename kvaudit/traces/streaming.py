"""A trace request by request: segments are kept once, requests are not kept at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvaudit.records import Request
from kvaudit.traces import NotThisFormatError, TraceSource, read_source
from kvaudit.traces.native import NAME, iter_native
from kvaudit.traces.source import open_source


def iter_requests(path: Path, format: str | None = None) -> Iterator[Request]:  # noqa: A002
    """The requests of `read_trace` as they are read, with its errors where they are met.

    kvaudit's own format is streamed; any other is read whole first.
    """
    with open_source(path) as source:
        yield from _requests(source, format)


def _requests(source: TraceSource, name: str | None) -> Iterator[Request]:
    if name in (None, NAME):
        try:
            return iter_native(source)
        except NotThisFormatError:
            pass
    return iter(read_source(source, name).requests)
