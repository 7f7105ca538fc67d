"""What makes a request sound, and how sound requests become a trace. Readers and the writer share it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

from kvaudit.errors import TraceError
from kvaudit.records import Request, Segment, Trace
from kvaudit.traces.id_lists import ListedPrompt
from kvaudit.traces.segments import TraceDigest
from kvaudit.traces.source import TraceSource

_text = attrgetter("text")


class RequestChecks:
    """Holds every request of a trace against what a replay needs, and its id against those before it."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def problem(self, request: Request, blanks: bool = True) -> str | None:
        """What is wrong with the request, as the end of a sentence that begins with its id; None where it is sound.

        `blanks` is false where the reader knows that no segment so far is without text.
        """
        if request.request_id in self._places:
            return f"has the id of {self._places[request.request_id]}"
        place = f"request {len(self._places) + 1}" if request.line is None else f"line {request.line}"
        self._places[request.request_id] = place
        if not request.request_id:
            return "has an empty id"
        if request.max_tokens < 1:
            return f"has max_tokens {request.max_tokens}, and an answer needs at least one token"
        if not request.segments:
            return "has no segments"
        if not (blanks or request.chat) and all(request.prelude):
            return None
        return _in_prompt(request, request.segments, "") or next(
            (
                problem
                for number, prompt in enumerate(request.prelude, start=1)
                if (problem := _in_prompt(request, prompt, f"prelude {number}, "))
            ),
            None,
        )

    @property
    def count(self) -> int:
        return len(self._places)


def _in_prompt(request: Request, segments: Sequence[Segment], where: str) -> str | None:
    if not segments:
        return f"has nothing in {where.rstrip(', ')}"
    if request.chat:
        if segments[0].role is None:
            return f"is a chat, and {where}segment 1 has no role, so that it belongs to no message"
        for number, segment in enumerate(segments, start=1):
            if segment.token_ids is not None:
                return f"is a chat, and {where}segment {number} has token ids in place of a text"
            if segment.role is None and not segment.text:
                return f"has no text in {where}segment {number} ({segment.kind})"
    elif "" in map(_text, segments):
        for number, segment in enumerate(segments, start=1):
            if not segment.text and not segment.token_ids:
                return f"has no text in {where}segment {number} ({segment.kind})"
    return None


def build_trace(
    source: TraceSource,
    requests: Iterable[Request],
    header: Mapping[str, object],
    blanks: Callable[[], bool] = lambda: True,
    listed: Callable[[], ListedPrompt | None] = lambda: None,
) -> Trace:
    """The trace of these requests. `header` may still be filled while they are read. `blanks` says whether a segment
    without text has been read so far, `listed` how the prompt of the latest request was written.

    Raises TraceError with file and line for a request that cannot be replayed, an id that occurs twice, no requests.
    """
    digest, kept = TraceDigest(), []
    with _no_collections():
        for request in sound_requests(source, requests, blanks):
            digest.add(request, listed())
            kept.append(request)
    return Trace(tuple(kept), digest.hexdigest(), source.name, header)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Requests are no cycles, and to look for some among millions of references takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sound_requests(
    source: TraceSource, requests: Iterable[Request], blanks: Callable[[], bool] = lambda: True
) -> Iterator[Request]:
    """The same requests, checked as they come. Raises what `build_trace` raises."""
    checks = RequestChecks()
    for request in requests:
        if problem := checks.problem(request, blanks()):
            raise source.error(request.line or 1, f"request {request.request_id!r} {problem}")
        yield request
    if not checks.count:
        raise TraceError(f"{source.name} holds no requests")
