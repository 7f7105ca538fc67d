"""Requests with placeholders in their texts, ids and stop strings, and what was replaced in all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

import orjson

from kvaudit.errors import TraceError
from kvaudit.records import Request, Segment, spoken_spans
from kvaudit.redaction.borders import cut_values, edges, stretch_digest, stretches
from kvaudit.redaction.detectors import Hit
from kvaudit.redaction.redactor import Redactor, Replacement
from kvaudit.traces.segments import SegmentPool


@dataclass(slots=True)
class ChangedSegment:
    """A distinct segment in which something was replaced, and in how many requests it is.

    `request_id`, as it was redacted, is the first that has it, `number` its place there from 1; preludes are counted
    on behind the prompt.
    """

    request_id: str
    number: int
    before: str
    after: str
    requests: int = 0


@dataclass(slots=True)
class Tally:
    """By detector: places in distinct texts, placeholders, requests."""

    places: Counter[str] = field(default_factory=Counter)
    placeholders: dict[str, set[str]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    changed_requests: int = 0

    def add(self, replaced: Iterable[Replacement]) -> None:
        for detector, placeholder in replaced:
            self.places[detector] += 1
            self.placeholders.setdefault(detector, set()).add(placeholder)


@dataclass(slots=True)
class _InRequest:
    """What was replaced in one request: by which detectors, in which segments."""

    detectors: set[str] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)


class RequestRedactor:
    """Redacts the requests of one trace. What recurs is looked at once."""

    def __init__(self, redactor: Redactor) -> None:
        self.tally = Tally()
        self._cut: dict[str, set[Hit]] = {}
        self._seen_stretches: set[bytes] = set()
        self._redactor = redactor
        self._pool = SegmentPool()
        self._segments: dict[str, tuple[Segment, frozenset[str]]] = {}
        self._texts: dict[str, tuple[str, frozenset[str]]] = {}
        self._extras: dict[str, tuple[str, frozenset[str]]] = {}
        self._changed: dict[str, ChangedSegment] = {}

    @property
    def changed(self) -> Sequence[ChangedSegment]:
        return list(self._changed.values())

    def redact(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, in which a segment that recurs is the same wherever it is, also where a border between two
        segments cut a value in one request only.

        Raises TraceError for a request with token ids: nobody sees what they stand for.
        """
        for request in requests:
            _refuse_token_ids(request)
            for segments in _spoken_together(request):
                self._look_across_borders(segments)
        return [self._request(request) for request in requests]

    def redact_header(self, header: Mapping[str, object]) -> dict[str, object]:
        try:
            redacted, replaced = self._redactor.redact_values(dict(header))
        except RecursionError as error:
            raise TraceError("the trace's header is nested too deep to be redacted") from error
        self.tally.add(replaced)
        return dict(redacted)

    def _look_across_borders(self, segments: Sequence[Segment]) -> None:
        names = [segment.content_id for segment in segments]
        for stretch in stretches(edges(segment.text) for segment in segments):
            key = stretch_digest(stretch, names)
            if key in self._seen_stretches:
                continue
            self._seen_stretches.add(key)
            for cut in cut_values(stretch, self._redactor.find):
                for at, part in cut.parts:
                    self._cut.setdefault(segments[at].content_id, set()).add(part)

    def _request(self, request: Request) -> Request:
        found = _InRequest()
        request_id = self._text(request.request_id, found)
        numbers = count(1)
        prompts = [
            tuple([self._segment(segment, request_id, next(numbers), found) for segment in prompt])
            for prompt in (request.segments, *request.prelude)
        ]
        made = replace(
            request,
            request_id=request_id,
            segments=prompts[0],
            prelude=tuple(prompts[1:]),
            session=None if request.session is None else self._text(request.session, found),
            stop=tuple([self._text(stop, found) for stop in request.stop]),
            expected=None if request.expected is None else self._text(request.expected, found),
            extra=self._extra(request.extra, found),
        )
        self._count(found)
        return made

    def _count(self, found: _InRequest) -> None:
        self.tally.requests.update(found.detectors)
        self.tally.changed_requests += bool(found.detectors)
        for content_id in found.segments:
            self._changed[content_id].requests += 1

    def _text(self, text: str, found: _InRequest) -> str:
        known = self._texts.get(text)
        if known is None:
            redacted = self._redactor.redact(text)
            self.tally.add(redacted.replaced)
            known = self._texts[text] = redacted.text, _detectors(redacted.replaced)
        found.detectors |= known[1]
        return known[0]

    def _extra(self, extra: str, found: _InRequest) -> str:
        """Names of fields tell what is below them; the same object is looked at once."""
        if not extra:
            return extra
        known = self._extras.get(extra)
        if known is None:
            redacted, replaced = self._redactor.redact_values(orjson.loads(extra))
            self.tally.add(replaced)
            known = orjson.dumps(redacted).decode() if replaced else extra, _detectors(replaced)
            self._extras[extra] = known
        found.detectors |= known[1]
        return known[0]

    def _segment(self, segment: Segment, request_id: str, number: int, found: _InRequest) -> Segment:
        known = self._segments.get(segment.content_id)
        if known is None:
            known = self._segments[segment.content_id] = self._looked_at(segment)
            if known[1]:
                changed = ChangedSegment(request_id, number, segment.text, known[0].text)
                self._changed[segment.content_id] = changed
        if known[1]:
            found.detectors |= known[1]
            found.segments.add(segment.content_id)
        return known[0]

    def _looked_at(self, segment: Segment) -> tuple[Segment, frozenset[str]]:
        text = self._redactor.redact(segment.text, self._cut.get(segment.content_id, ()))
        role = self._redactor.redact(segment.role or "")
        replaced = text.replaced + role.replaced
        if not replaced:
            return segment, frozenset()
        self.tally.add(replaced)
        return self._pool.intern(segment.kind, text.text, role.text or None), _detectors(replaced)


def _detectors(replaced: Iterable[Replacement]) -> frozenset[str]:
    return frozenset(detector for detector, _ in replaced)


def _spoken_together(request: Request) -> Iterator[Sequence[Segment]]:
    """Segments that follow each other with nothing in between: a prompt's, or a message's in a chat."""
    for prompt in (request.segments, *request.prelude):
        yield from (prompt[start:end] for start, end in spoken_spans(prompt, request.chat) if end - start > 1)


def _refuse_token_ids(request: Request) -> None:
    for number, segment in enumerate(chain(request.segments, *request.prelude), start=1):
        if segment.token_ids is not None:
            raise TraceError(
                f"request {request.request_id!r} carries token ids in segment {number}, which cannot be redacted",
                "take 'token_ids' out of the trace, so that its texts are replayed",
            )
