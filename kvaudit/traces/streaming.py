"""A trace request by request: segments are kept once, requests are not kept at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvaudit.records import Request
from kvaudit.traces import NotThisFormatError, TraceSource, read_source
from kvaudit.traces.hash_only import HashedTrace, HashesOnlyError, open_hashes
from kvaudit.traces.native import NAME, iter_native
from kvaudit.traces.source import open_source


@dataclass(frozen=True, slots=True)
class StreamedTrace:
    """`requests` as they are read; `header` is whole when they have been taken."""

    requests: Iterator[Request]
    header: Mapping[str, object]


@contextmanager
def open_trace(path: Path, format: str | None = None) -> Iterator[StreamedTrace | HashedTrace]:  # noqa: A002
    """A trace to be looked at: one with prompts, or one of lengths and hashes only.

    Raises what `read_trace` raises, save for hashes in place of prompts, and where it is met.
    """
    with open_source(path) as source:
        try:
            trace: StreamedTrace | HashedTrace = _streamed(source, format)
        except HashesOnlyError as hashes:
            trace = open_hashes(source, hashes.format)
        yield trace


def iter_requests(path: Path, format: str | None = None) -> Iterator[Request]:  # noqa: A002
    """The requests of `read_trace` as they are read, with its errors where they are met.

    kvaudit's own format is streamed; any other is read whole first.
    """
    with open_source(path) as source:
        yield from _streamed(source, format).requests


def _streamed(source: TraceSource, name: str | None) -> StreamedTrace:
    if name in (None, NAME):
        header: dict[str, object] = {}
        try:
            return StreamedTrace(iter_native(source, header), header)
        except NotThisFormatError:
            pass
    trace = read_source(source, name)
    return StreamedTrace(iter(trace.requests), trace.header)
