"""The rolling agent (Gu et al., 'Request Order Matters', section 4.1): a window of documents over an event stream.

Before each request the agent evicts `stride` documents and appends as many. What was in the window before is served
first, as the request's prelude; then the request asks for one observation of its window.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvaudit.errors import TraceError
from kvaudit.records import DEFAULT_MAX_TOKENS, DOCUMENT, INSTRUCTION, QUERY, SEPARATOR, Request, Segment
from kvaudit.traces.events import Event
from kvaudit.traces.segments import SegmentPool


@dataclass(frozen=True, slots=True)
class Rolling:
    """`window` and `stride` in documents. A separator stands before each document and before the question."""

    window: int = 84
    stride: int = 1
    instruction: str = ""
    separator: str = " # # "
    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    limit: int | None = None
    seed: int = 0

    @property
    def fewest_events(self) -> int:
        return self.window + self.stride


def too_short(streams: Mapping[str, Sequence[Event]], rolling: Rolling) -> list[str]:
    """The keys whose streams give no request. Raises TraceError when there is no other."""
    short = [key for key, events in streams.items() if len(events) < rolling.fewest_events]
    if len(short) == len(streams):
        longest = max(map(len, streams.values()))
        raise TraceError(
            f"a window of {rolling.window} with stride {rolling.stride} needs {rolling.fewest_events} events, and "
            f"{'the longest stream' if len(streams) > 1 else 'the table'} has {longest}",
            "take a smaller --window",
        )
    return short


def rolling_requests(streams: Mapping[str, Sequence[Event]], rolling: Rolling) -> Iterator[Request]:
    """The requests of all keys, interleaved by the time of their newest document; a key is a session.

    What a request asks for depends on the seed and its id alone. Raises TraceError where a window has no observation
    that can be asked for.
    """
    pool = SegmentPool()
    moves = heapq.merge(*(_moves(key, events, rolling) for key, events in streams.items()), key=_when)
    for ordinal, move in enumerate(islice(moves, rolling.limit)):
        asked = _asked(move, rolling.seed)
        yield Request(
            request_id=move.request_id,
            ordinal=ordinal,
            segments=tuple(_prompt(move.window, rolling, pool, asked.question)),
            prelude=(tuple(_prompt(move.previous, rolling, pool)),),
            session=move.key,
            max_tokens=rolling.max_tokens,
            stop=rolling.stop,
            expected=asked.answer,
            timestamp=move.window[-1].timestamp,
        )


@dataclass(frozen=True, slots=True)
class _Move:
    request_id: str
    key: str
    previous: Sequence[Event]
    window: Sequence[Event]


def _moves(key: str, events: Sequence[Event], rolling: Rolling) -> Iterator[_Move]:
    starts = range(rolling.stride, len(events) - rolling.window + 1, rolling.stride)
    for number, start in enumerate(starts, start=1):
        before = start - rolling.stride
        yield _Move(
            request_id=f"{key}-{number:04d}",
            key=key,
            previous=events[before : before + rolling.window],
            window=events[start : start + rolling.window],
        )


def _when(move: _Move) -> float:
    return move.window[-1].when


def _prompt(events: Sequence[Event], rolling: Rolling, pool: SegmentPool, question: str | None = None) -> list[Segment]:
    parts = [pool.intern(DOCUMENT, event.document) for event in events]
    if rolling.instruction:
        parts.insert(0, pool.intern(INSTRUCTION, rolling.instruction))
    if question is not None:
        parts.append(pool.intern(QUERY, question))
    if not rolling.separator:
        return parts
    separator = pool.intern(SEPARATOR, rolling.separator)
    return [segment for part in parts for segment in (separator, part)][1:]


def _asked(move: _Move, seed: int) -> Event:
    """An observation of the window that has an answer, and whose question has only this answer in the window."""
    answers = defaultdict(set)
    for event in move.window:
        answers[event.question].add(event.answer)
    fit = [event for event in move.window if event.answer and len(answers[event.question]) == 1]
    if not fit:
        raise TraceError(
            f"request {move.request_id!r}: no observation of its window can be asked for",
            "each has no answer, or shares its question with another: see --question and --answer",
        )
    return random.Random(f"{seed}/{move.request_id}").choice(fit)
