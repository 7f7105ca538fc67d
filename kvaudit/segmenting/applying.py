"""Strategies applied to the requests of a trace, and what each of them did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvaudit.records import Request, Segment, spoken_spans
from kvaudit.segmenting.merging import by_message
from kvaudit.segmenting.pieces import CutError, OffsetTokenizer, Piece, Prepared, Rewrite
from kvaudit.segmenting.strategies import Strategy
from kvaudit.traces.segments import SegmentPool


@dataclass(frozen=True, slots=True)
class Step:
    """What one strategy did. `segments_before` and `segments_after` count the segments of all prompts.

    `than` is what it is held against: the segments before it or, where it goes by the parts that a log has, those
    that a message each makes. `told` says in words what it saw, and why it changed nothing.
    """

    strategy: str
    requests: int
    changed: int
    segments_before: int
    segments_after: int
    found: Mapping[str, object]
    told: str
    than: str

    def as_data(self) -> dict[str, object]:
        counts = {"requests_changed": self.changed, "segments": [self.segments_before, self.segments_after]}
        return {"strategy": self.strategy, **counts, **self.found}

    def sentence(self) -> str:
        told = f"{self.told}; " if self.told else ""
        if not self.changed:
            return f"{self.strategy}: {told}no request is cut otherwise than {self.than}"
        of_all = f"{self.changed:,} of {self.requests:,} request{'' if self.requests == 1 else 's'}"
        return (
            f"{self.strategy}: {told}{of_all} {'is' if self.changed == 1 else 'are'} cut otherwise than {self.than}, "
            f"{self.segments_before:,} segments became {self.segments_after:,}"
        )


@dataclass(frozen=True, slots=True)
class Segmented:
    requests: list[Request]
    steps: tuple[Step, ...]


def segment_requests(
    requests: Sequence[Request], strategies: Sequence[Strategy], tokenizer: OffsetTokenizer
) -> Segmented:
    """The same requests with their prompts cut and joined by each strategy in turn.

    Raises CutError, naming the request, for a strategy that does not get on with a text.
    """
    steps = []
    found = list(requests)
    pool = SegmentPool()
    for strategy in strategies:
        prepared = strategy.prepare(found, tokenizer)
        before = _rewritten(found, by_message, pool) if strategy.known.reads_parts else found
        found = _rewritten(found, prepared.rewrite, pool)
        steps.append(_step(strategy, prepared, before, found))
    return Segmented(found, tuple(steps))


def _rewritten(requests: Sequence[Request], rewrite: Rewrite, pool: SegmentPool) -> list[Request]:
    messages = _Messages(rewrite, pool)
    return [messages.request(request) for request in requests]


def _step(strategy: Strategy, prepared: Prepared, before: Sequence[Request], after: Sequence[Request]) -> Step:
    changed = sum(_prompts(old) != _prompts(new) for old, new in zip(before, after, strict=True))
    looked, told = prepared.looked, [prepared.told]
    if not changed and not (looked and looked.matching):
        told += [strategy.known.nothing, looked.sentence() if looked else ""]
    return Step(
        strategy.written,
        len(before),
        changed,
        _segments(before),
        _segments(after),
        prepared.found,
        "; ".join(filter(None, told)),
        "by message" if strategy.known.reads_parts else "before",
    )


def _prompts(request: Request) -> tuple[tuple[Segment, ...], ...]:
    return request.segments, *request.prelude


def _segments(requests: Sequence[Request]) -> int:
    return sum(len(prompt) for request in requests for prompt in _prompts(request))


class _Messages:
    """Rewrites every distinct message once."""

    def __init__(self, rewrite: Rewrite, pool: SegmentPool) -> None:
        self._rewrite, self._pool = rewrite, pool
        self._known: dict[tuple[str, ...], tuple[Segment, ...]] = {}

    def request(self, request: Request) -> Request:
        """The request itself where nothing changes."""
        try:
            segments = self._prompt(request.segments, request.chat)
            prelude = tuple(self._prompt(prompt, request.chat) for prompt in request.prelude)
        except CutError as error:
            raise CutError(f"request {request.request_id!r}: {error.message}", error.hint) from error
        if segments == request.segments and prelude == request.prelude:
            return request
        return replace(request, segments=segments, prelude=prelude)

    def _prompt(self, segments: tuple[Segment, ...], chat: bool) -> tuple[Segment, ...]:
        spans = spoken_spans(segments, chat)
        return tuple(segment for start, end in spans for segment in self._message(segments[start:end]))

    def _message(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        key = tuple(segment.content_id for segment in segments)
        if key not in self._known:
            self._known[key] = self._rewritten(segments)
        return self._known[key]

    def _rewritten(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Segments that stay are the same objects."""
        before = [Piece(segment.kind, segment.text, segment.token_ids) for segment in segments]
        after = self._rewrite(before, segments[0].role)
        if list(after) == before:
            return segments
        roles = [segments[0].role, *[None] * (len(after) - 1)]
        return tuple(
            self._pool.intern(piece.kind, piece.text, role, piece.token_ids)
            for piece, role in zip(after, roles, strict=True)
        )
