"""Writes kvaudit's own traces request by request: what is kept of them are ids, so a trace may outgrow the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

import orjson

from kvaudit import __version__
from kvaudit.errors import TraceError
from kvaudit.records import Request, Segment
from kvaudit.traces.assembly import RequestChecks
from kvaudit.traces.native import HEADER, VERSION
from kvaudit.traces.output import whole_file
from kvaudit.traces.segments import TraceDigest, make_segment


@dataclass(frozen=True, slots=True)
class Written:
    """What a trace holds. `digest` is what reading it gives."""

    requests: int
    distinct_segments: int
    sessions: int
    digest: str


def write_trace(path: Path, requests: Iterable[Request], header: Mapping[str, object] | None = None) -> Written:
    """Write requests as they come to `path`, gzip or zstd by its suffix. `header`: how they were made.

    Raises TraceError, and leaves `path` as it was, for a request that could not be read back or no requests at all.
    """
    with open_trace(path, header) as writer:
        for request in requests:
            writer.add(request)
    return writer.written()


@contextmanager
def open_trace(path: Path, header: Mapping[str, object] | None = None) -> Iterator[TraceWriter]:
    """A writer whose trace is at `path` when the block ends without an error."""
    with whole_file(path) as stream:
        writer = TraceWriter(stream, header or {})
        yield writer
        if not writer.written().requests:
            raise TraceError(f"{path} is not written: there are no requests")


class TraceWriter:
    """Writes to a binary stream. Segments are written where they first occur."""

    def __init__(self, stream: IO[bytes], header: Mapping[str, object]) -> None:
        self._stream = stream
        self._checks, self._digest = RequestChecks(), TraceDigest()
        self._defined: set[str] = set()
        self._sessions: set[str] = set()
        self._line({HEADER: VERSION, "made_by": f"kvaudit {__version__}", **header}, "the header")

    def add(self, request: Request) -> None:
        """Raises TraceError for a request that could not be read back."""
        name = f"request {request.request_id!r}"
        if problem := self._checks.problem(request):
            raise TraceError(f"{name} {problem}")
        for segment in chain(request.segments, *request.prelude):
            if segment.content_id not in self._defined:
                self._define(segment, name)
        self._line(_request_line(request), name)
        self._digest.add(request)
        if request.session:
            self._sessions.add(request.session)

    def written(self) -> Written:
        return Written(
            self._checks.count, self._digest.distinct_segments, len(self._sessions), self._digest.hexdigest()
        )

    def _define(self, segment: Segment, name: str) -> None:
        try:
            content = make_segment(segment.kind, segment.text, segment.role, segment.token_ids)
        except TraceError as error:
            raise TraceError(f"{name}: {error.message}", error.hint) from error
        if content.content_id != segment.content_id:
            raise TraceError(f"{name} has a segment whose id {segment.content_id!r} is not that of its content")
        optional = {"role": segment.role, "token_ids": segment.token_ids}
        self._line(
            {"segment": segment.content_id, "kind": segment.kind, "text": segment.text, **_given(optional)}, name
        )
        self._defined.add(segment.content_id)

    def _line(self, values: Mapping[str, object], name: str) -> None:
        try:
            self._stream.write(orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE))
        except TypeError as error:
            raise TraceError(f"{name} cannot be written as JSON: {error}") from error


def _request_line(request: Request) -> dict[str, object]:
    optional = {
        "prelude": [[segment.content_id for segment in prompt] for prompt in request.prelude] or None,
        "session": request.session or None,
        "stop": request.stop or None,
        "chat": request.chat or None,
        "expected": request.expected,
        "timestamp": request.timestamp,
        "extra": orjson.Fragment(request.extra) if request.extra else None,
    }
    return {
        "request": request.request_id,
        "segments": [segment.content_id for segment in request.segments],
        "max_tokens": request.max_tokens,
        **_given(optional),
    }


def _given(optional: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in optional.items() if value is not None}
