"""What an engine says about a prompt, as rows of a run's tables (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvaudit.records import Arm, Eviction, Part, Prompt, Provenance, Reference, Request, Selection, Served, Write

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What serving one request and, before it, the prompts of its prelude brought.

    `cache_entries_before` is None where nobody looked. `rounding_tokens`: of the tokens that were recomputed, the
    prelude's among them, how many rounding chose; None where nobody looked.
    """

    request_id: str
    prelude: tuple[Served, ...]
    served: Served
    cache_entries_before: int | None
    rounding_tokens: int | None = None

    @property
    def parts(self) -> tuple[tuple[Part, Served], ...]:
        return *(("prelude", served) for served in self.prelude), ("request", self.served)


def request_row(request: Request, prompt: Prompt) -> Row:
    return {
        "request_id": request.request_id,
        "ordinal": request.ordinal,
        "prompt_tokens": prompt.length,
        "segments": [
            {"kind": part.kind, "content_id": part.content_id, "start": part.start, "end": part.end}
            for part in prompt.segments
        ],
        "session": request.session,
        "expected": request.expected,
        "timestamp": request.timestamp,
    }


def observation_row(
    arm: Arm, engine: str, position: int, exchange: Exchange, reference_answer: Sequence[int] | None
) -> Row:
    """`reference_answer`: the answer ids of full prefill, None in the arm that is itself the reference.

    An answer with text and without ids comes from an engine that shows none: its ids are unknown, not empty.
    """
    served = exchange.served
    return {
        "arm_id": arm.arm_id,
        "engine": engine,
        "policy": arm.policy,
        "order": arm.order.name,
        "order_seed": arm.order.seed,
        "control": arm.control,
        "position": position,
        "request_id": exchange.request_id,
        "prompt_tokens": served.prompt_tokens,
        "answer_text": served.answer_text,
        "answer_ids": list(served.answer_ids) if served.answer_ids or not served.answer_text else None,
        "finish_reason": served.finish_reason,
        "ttft_ms": served.ttft_ms,
        "total_ms": served.total_ms,
        "reused_tokens": served.reused_tokens,
        "reusable_tokens": served.reusable_tokens,
        "recomputed_tokens": served.recomputed_tokens,
        "budget_k": served.budget_k,
        "prelude_reused_tokens": _total(part.reused_tokens for part in exchange.prelude),
        "first_reused_tokens": exchange.parts[0][1].reused_tokens,
        "cache_entries_before": exchange.cache_entries_before,
        "fragmentation": None if served.selection is None else len(served.selection.spans),
        "captured_deviation": captured_deviation(served.selection),
        "kl": served.kl,
        "reference_logprob": served.reference_logprob,
        "first_difference": None if reference_answer is None else first_difference(served.answer_ids, reference_answer),
        "margin": served.margin,
        "rounding_tokens": exchange.rounding_tokens,
        "attempts": _most(part.attempts for _, part in exchange.parts),
    }


def _total(counts: Iterable[int | None]) -> int | None:
    """None where there are none, or one is unknown."""
    known = list(counts)
    return None if not known or None in known else sum(count or 0 for count in known)


def _most(counts: Iterable[int | None]) -> int | None:
    """None where none is known."""
    return max((count for count in counts if count is not None), default=None)


def selection_row(arm_id: str, request_id: str, selection: Selection) -> Row:
    return {
        "arm_id": arm_id,
        "request_id": request_id,
        "layer": selection.layer,
        "spans": [
            {"start": start, "end": end, "deviation": deviation}
            for (start, end), deviation in zip(selection.spans, selection.deviation, strict=True)
        ],
        "total_deviation": selection.total_deviation,
    }


def provenance_rows(arm_id: str, exchange: Exchange) -> list[Row]:
    whose = {"arm_id": arm_id, "request_id": exchange.request_id}
    return [{**whose, **_fields(origin)} for origin in exchange.served.provenance]


def write_rows(arm_id: str, exchange: Exchange) -> list[Row]:
    whose = {"arm_id": arm_id, "request_id": exchange.request_id}
    return [{**whose, "part": part, **_fields(write)} for part, served in exchange.parts for write in served.writes]


def eviction_rows(arm_id: str, exchange: Exchange) -> list[Row]:
    whose = {"arm_id": arm_id, "request_id": exchange.request_id}
    return [
        {**whose, "part": part, **_fields(eviction)} for part, served in exchange.parts for eviction in served.evictions
    ]


def reference_row(request_id: str, reference: Reference) -> Row:
    return {
        "request_id": request_id,
        "generated_ids": list(reference.generated_ids),
        "top_ids": list(reference.top_ids),
        "top_logprobs": list(reference.top_logprobs),
    }


def captured_deviation(selection: Selection | None) -> float | None:
    """The share of the token deviation that was recomputed; None where there is none to recompute (DESIGN 3)."""
    if selection is None or not selection.total_deviation:
        return None
    return sum(selection.deviation) / selection.total_deviation


def first_difference(answer: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token where two answers part; where one begins the other, the length of the shorter."""
    for index, (left, right) in enumerate(zip(answer, reference, strict=False)):
        if left != right:
            return index
    return None if len(answer) == len(reference) else min(len(answer), len(reference))


def _fields(fact: Provenance | Write | Eviction) -> Row:
    """As `dataclasses.asdict`, without its deep copies: there is one such fact per segment of every prompt."""
    return {name: getattr(fact, name) for name in fact.__slots__}
