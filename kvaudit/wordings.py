"""From a trace to what a server is asked: messages, texts or token ids, tiled by segments.

The server tokenises and puts the chat template around messages. Positions are those of bytes of the text in UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from kvaudit.engines import Capabilities
from kvaudit.errors import TraceError
from kvaudit.records import Prompt, PromptSegment, Request, Segment, Trace, Wording, messages_of

_ID_DIGITS = 16


class Wordings:
    """The prompts of a trace for an engine without a tokenizer of ours."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str]] = {}

    def request(self, request: Request) -> Prompt:
        return self._prompt(request, request.segments)

    def prelude(self, request: Request) -> Iterator[Prompt]:
        for segments in request.prelude:
            yield self._prompt(request, segments)

    def check(self, trace: Trace, capabilities: Capabilities) -> None:
        """Raises TraceError, with its line, for a request that cannot be put into words."""
        for request in trace.requests:
            for segments in (request.segments, *request.prelude):
                if problem := _problem(request, segments):
                    line = "" if request.line is None else f", line {request.line}"
                    raise TraceError(f"{trace.source}{line}: request {request.request_id!r} {problem}")

    def _prompt(self, request: Request, segments: Sequence[Segment]) -> Prompt:
        tiles, end = list[PromptSegment](), 0
        for segment in segments:
            length, content_id = self._known_as(segment)
            if length:
                tiles.append(PromptSegment(segment.kind, content_id, end, end + length))
                end += length
        wording = _wording(request, segments)
        return Prompt(wording.token_ids, tuple(tiles), wording)

    def _known_as(self, segment: Segment) -> tuple[int, str]:
        """Length and hash of what is sent of a segment."""
        known = self._known.get(segment.content_id)
        if known is None:
            sent = segment.text.encode() if segment.token_ids is None else repr(segment.token_ids).encode()
            length = len(sent) if segment.token_ids is None else len(segment.token_ids)
            known = self._known[segment.content_id] = length, sha256(sent).hexdigest()[:_ID_DIGITS]
        return known


def _wording(request: Request, segments: Sequence[Segment]) -> Wording:
    if request.chat:
        return Wording(messages=tuple(messages_of(segments)), extra=request.extra)
    if segments[0].token_ids is not None:
        ids = tuple(token for segment in segments for token in segment.token_ids or ())
        return Wording(token_ids=ids, extra=request.extra)
    return Wording(text="".join(segment.text for segment in segments), extra=request.extra)


def _problem(request: Request, segments: Sequence[Segment]) -> str | None:
    with_ids = sum(segment.token_ids is not None for segment in segments)
    if with_ids not in (0, len(segments)):
        return "carries token ids in some segments and texts in others: a server takes either"
    if not any(segment.token_ids if with_ids else segment.text for segment in segments):
        return "has an empty prompt"
    if request.max_tokens < 1:
        return f"asks for {request.max_tokens} tokens, and an answer needs at least one"
    return None
