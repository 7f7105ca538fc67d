"""Logs that others wrote: calls as a log holds them become requests, and what is left out is counted by its reason.

A reader of such a format finds the calls in its file; what a call must be to be replayed stands here, once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import DEFAULT_MAX_TOKENS, Request, Trace
from kvaudit.traces.assembly import build_trace
from kvaudit.traces.bodies import CHAT, COMPLETIONS, body_limit, body_messages, body_segments, body_stop
from kvaudit.traces.extras import extra_fields
from kvaudit.traces.fields import Fields
from kvaudit.traces.logs import LINE, Log, Record
from kvaudit.traces.outcomes import answer_is_empty, logged_length
from kvaudit.traces.repeats import Seen, distinct
from kvaudit.traces.segments import SegmentPool
from kvaudit.traces.source import TraceSource
from kvaudit.traces.tally import LeftOut, Tally, told_left_out
from kvaudit.traces.times import seconds
from kvaudit.traces.tools import calls_of, definitions_of

NOTES = "notes"
LEFT_OUT = "left_out"
WITH_TOOLS = "with_tools"
EMPTY_ANSWERS = "empty_answers"
_COUNTED = {
    WITH_TOOLS: "request{} with tools: definitions and calls are replayed as JSON text, not in the model's own tool "
    "template",
    EMPTY_ANSWERS: "logged answer{} without text; the requests are kept",
}

_SUBJECT = re.compile(r"((?:the request|request '[^']*'|message \d+|the prompt)) ")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a model as a log holds it.

    `body` is the request as `api` takes it (`bodies.CHAT` and its like), `before` messages that the server kept from
    earlier calls. `time` is in seconds, milli-, micro- or nanoseconds since 1970, or ISO 8601. `output_tokens` is the
    logged length of the answer and `response` the logged answer, where there are such. `failure` says why it failed.
    `as_sent`: the body is what the server got, and no field in it is the log's own.
    """

    place: int
    body: dict[str, Any]
    api: str = CHAT
    request_id: Any = None
    session: Any = None
    time: Any = None
    output_tokens: Any = None
    response: Any = None
    failure: str | None = None
    before: Sequence[Any] = ()
    as_sent: bool = False


Convert = Callable[[int, Record], Iterable[Call | LeftOut]]
"""What a record of a log holds, from its place and the record."""

Examples = tuple[tuple[str, Mapping[str, Sequence[str]]], ...]
"""Pairs of (file, what it becomes): the messages of each request by its id, as `role: text`, or `query: text` where it
is a plain prompt."""


class NothingToReplayError(TraceError):
    """A log of a known format in which every record was left out."""

    def __init__(self, name: str, tally: Tally) -> None:
        reasons = "; ".join(told_left_out(row) for row in tally.rows())
        super().__init__(f"{name} holds no request that can be replayed" + (f": {reasons}" if reasons else ""))
        self.tally = tally


def told_counts(header: Mapping[str, Any]) -> list[str]:
    """The counts of a header as lines of text."""
    return [
        f"{header[name]:,} {words.format('' if header[name] == 1 else 's')}"
        for name, words in _COUNTED.items()
        if header.get(name)
    ]


def foreign_trace(source: TraceSource, log: Log, convert: Convert, *, in_order: bool = True) -> Trace:
    """The trace of what `convert` finds in the records of a log.

    The header says how many `records` there were, what was `left_out` and why, with `notes` on the whole and counts
    of what was kept: `with_tools`, `empty_answers`. A TraceError of `convert` leaves out its record. `in_order`:
    records stand in the order in which the calls were made; else they are sorted by their times. Raises TraceError
    where nothing can be replayed.
    """
    tally = log.tally
    reading = _Reading(source, tally)
    requests = [request for place, record in log.records for request in reading.requests(place, record, convert)]
    tally.notes += reading.notes()
    if not requests:
        raise NothingToReplayError(source.name, tally)
    if not in_order:
        requests, note = by_time(requests)
        tally.notes += [note] if note else []
    numbered = (replace(request, ordinal=ordinal) for ordinal, request in enumerate(requests))
    header: dict[str, object] = {"records": len(requests) + tally.total}
    if rows := tally.rows():
        header[LEFT_OUT] = rows
    if tally.notes:
        header[NOTES] = tally.notes
    counts = {WITH_TOOLS: reading.with_tools, EMPTY_ANSWERS: reading.empty_answers}
    header |= {name: count for name, count in counts.items() if count}
    return build_trace(source, numbered, header)


def by_time(requests: list[Request], log: str = "the log") -> tuple[list[Request], str | None]:
    """Requests in the order of their times, and what to say of it where that is not their order in `log`."""
    times = [request.timestamp for request in requests if request.timestamp is not None]
    if len(times) < len(requests):
        missing = len(requests) - len(times)
        return requests, f"{missing:,} of {len(requests):,} requests have no time: they are in the order of {log}"
    if times == sorted(times):
        return requests, None
    return sorted(
        requests, key=attrgetter("timestamp")
    ), f"requests are sorted by their times, which are not in order in {log}"


@dataclass(slots=True)
class _Reading:
    source: TraceSource
    tally: Tally
    pool: SegmentPool = field(default_factory=SegmentPool)
    places: dict[str, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    next_numbers: dict[str, int] = field(default_factory=dict)
    renamed: int = 0
    with_tools: int = 0
    empty_answers: int = 0

    def requests(self, place: int, record: Record, convert: Convert) -> Iterator[Request]:
        try:
            for call in convert(place, record):
                outcome = call if isinstance(call, LeftOut) else self._converted(call)
                if isinstance(outcome, LeftOut):
                    self.tally.add(outcome)
                else:
                    yield outcome
        except TraceError as refusal:
            self.tally.add(self._refused(place, refusal))

    def _converted(self, call: Call) -> Request | LeftOut:
        if call.failure:
            return LeftOut(call.place, call.failure)
        try:
            request = self._request(call)
        except TraceError as refusal:
            return self._refused(call.place, refusal)
        name = request.request_id
        if self.seen.holds(name, request):
            first = self.places[name]
            return LeftOut(call.place, "has an id and a prompt that came before", f"first in {self.tally.unit} {first}")
        self.seen.add(name, request)
        if name in self.places:
            renamed, self.next_numbers[name] = distinct(name, self.places, self.next_numbers.get(name, 2))
            request = replace(request, request_id=renamed)
            self.renamed += 1
        self.places[request.request_id] = call.place
        self.with_tools += self._has_tools(call)
        self.empty_answers += answer_is_empty(call.response)
        return request

    def _request(self, call: Call) -> Request:
        told = Fields(self.source, call.place, {"id": call.request_id, "session": call.session}, "the request")
        fields = Fields(self.source, call.place, call.body, "the request")
        segments = body_segments(call.api, self.source, call.place, call.body, self.pool, call.before)
        if not segments:
            raise fields.error("has no messages")
        if not any(segment.text or segment.token_ids for segment in segments):
            raise fields.error("has no text")
        limit = body_limit(call.api, fields) or logged_length(call.output_tokens) or logged_length(call.response)
        return Request(
            request_id=told.name("id") or self._place_as_id(call.place),
            ordinal=0,
            segments=segments,
            session=told.name("session"),
            max_tokens=limit or DEFAULT_MAX_TOKENS,
            stop=body_stop(call.api, self.source, call.place, call.body),
            chat=call.api != COMPLETIONS,
            timestamp=seconds(call.time),
            limited=limit is not None,
            line=call.place if self.tally.unit == LINE else None,
            extra=extra_fields(call.api, call.body) if call.as_sent else "",
        )

    def _place_as_id(self, place: int) -> str:
        name = f"{self.tally.unit}-{place}"
        return name if name not in self.places else f"{name}-{len(self.places)}"

    def notes(self) -> list[str]:
        if not self.renamed:
            return []
        many = self.renamed > 1
        return [
            f"{self.renamed:,} request{'s have ids' if many else ' has an id'} that came before with another prompt, "
            f"time or session: kept as ID#2{' and so on' if many else ''}"
        ]

    def _refused(self, place: int, refusal: TraceError) -> LeftOut:
        reason = refusal.message.removeprefix(f"{self.source.name}, line {place}: ")
        subject = _SUBJECT.match(reason)
        return LeftOut(place, reason[subject.end() :], subject[1]) if subject else LeftOut(place, reason)

    def _has_tools(self, call: Call) -> bool:
        if call.api == COMPLETIONS:
            return False
        fields = Fields(self.source, call.place, call.body, "the request")
        messages = body_messages(call.api, fields, call.body, call.before)
        return bool(definitions_of(call.body) or any(calls_of(message) for message in messages))
