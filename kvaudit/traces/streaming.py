"""A trace request by request: segments are kept once, requests are not kept at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvaudit.records import Request
from kvaudit.traces import NotThisFormatError, TraceSource, read_source
from kvaudit.traces.hash_only import HashedTrace, HashesOnlyError, open_hash_folder, open_hashes
from kvaudit.traces.native import NAME, iter_native
from kvaudit.traces.source import open_source


@dataclass(frozen=True, slots=True)
class StreamedTrace:
    """`requests` as they are read; `header` is whole when they have been taken."""

    requests: Iterator[Request]
    header: Mapping[str, object]


@contextmanager
def open_trace(path: Path, format: str | None = None) -> Iterator[StreamedTrace | HashedTrace]:  # noqa: A002
    """A trace to be looked at: one with prompts, or one of lengths and hashes only, also as a folder of WEKA sessions.

    kvaudit's own format is streamed; any other with prompts is read whole first. Raises what `read_trace` raises, save
    for hashes in place of prompts, and where it is met.
    """
    if format in (None, "weka") and str(path) != "-" and path.is_dir():
        yield open_hash_folder(path)
        return
    with open_source(path) as source:
        try:
            trace: StreamedTrace | HashedTrace = _streamed(source, format)
        except HashesOnlyError as hashes:
            trace = open_hashes(source, hashes.format)
        yield trace


def _streamed(source: TraceSource, name: str | None) -> StreamedTrace:
    if name in (None, NAME):
        header: dict[str, object] = {}
        try:
            return StreamedTrace(iter_native(source, header), header)
        except NotThisFormatError:
            pass
    trace = read_source(source, name)
    return StreamedTrace(iter(trace.requests), trace.header)
