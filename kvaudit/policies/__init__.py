"""The contract of a recomputation policy. One method a file beside this one, one line each in `plugins.py`.

A policy sees one request at a time and returns which reusable tokens to recompute (`select`). It is made anew for
every arm, from its parameters, and holds no state between requests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from kvaudit.errors import PolicyError
from kvaudit.policies.context import (
    ChunkAttention,
    Floats,
    Need,
    Positions,
    SegmentView,
    SelectionContext,
    Signals,
    Written,
    WrittenAttention,
)

__all__ = [
    "BudgetContext",
    "ChunkAttention",
    "Floats",
    "Need",
    "Policy",
    "Positions",
    "SegmentView",
    "SelectionContext",
    "Signals",
    "Start",
    "Written",
    "WrittenAttention",
    "checked_budget",
    "checked_schedule",
    "checked_selection",
    "ratio_budget",
]

Start = Literal["check-layer", "first-layer"]


@dataclass(frozen=True, slots=True)
class BudgetContext:
    """What a budget may depend on: N reusable tokens, the recompute ratio, the prompt's tiling and, int64 [N], the
    positions of the reusable tokens."""

    reusable: int
    ratio: float
    segments: Sequence[SegmentView]
    positions: Positions


class Policy(ABC):
    """Which reusable tokens to recompute. Parameters of a policy are the fields of its (frozen) dataclass.

    name: under which it is listed; reports call it so.
    needs: the signals that it asks its context for. The engine computes no other, and what they cost counts as TTFT.
    start: the layer from which selected tokens are recomputed, and at which the selection happens. `check-layer`
        (CacheBlend's): everything below it is computed for all tokens, so that deviations can be seen. `first-layer`
        (EPIC's): selected tokens are recomputed from layer 0 on; nothing is computed for the others. A policy that
        starts there is asked before anything is computed and sees no deviation.
    engine: the only engine that has it, for a policy that is an engine's own selection, which is left untouched.
    untimed_seconds: time that went into what a measurement wants to know of its choice and not into the choice; grows
        from request to request. Engines leave it out of TTFT.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset({"deviation"})
    start: ClassVar[Start] = "check-layer"
    engine: ClassVar[str | None] = None
    untimed_seconds = 0.0

    def budget(self, request: BudgetContext) -> int:
        """k, how many positions `select` returns, 0 <= k <= N."""
        return ratio_budget(request.reusable, request.ratio)

    def schedule(self, k: int, reusable: int, layers: int) -> Sequence[int] | None:
        """How many tokens are recomputed at each of the `layers` layers from the selection layer on; None: k at each.

        For policies that narrow their selection layer by layer (CacheBlend's gradual filter). Never rises from layer to
        layer, sums to k * layers (the same budget as everyone's), and begins with at most `reusable`. `select` is
        asked at every layer where it falls, with k from here and the tokens that are left as its positions.
        """
        return None

    @property
    def narrows(self) -> bool:
        """Whether it has a schedule of its own."""
        return type(self).schedule is not Policy.schedule

    @abstractmethod
    def select(self, context: SelectionContext) -> Positions:
        """int64 [k], exactly `context.k` distinct of `context.positions`, in any order."""


def ratio_budget(reusable: int, ratio: float) -> int:
    """k = max(1, floor(r N)), and 0 when nothing is reusable (LMCache's rule; paper 2.2, equation 2)."""
    return min(reusable, max(1, math.floor(ratio * reusable))) if reusable else 0


def checked_budget(policy: Policy, request: BudgetContext) -> int:
    """The policy's k. Raises PolicyError, naming the policy, unless it is a whole number from 0 to N."""
    k = policy.budget(request)
    if not _is_whole(k) or not 0 <= k <= request.reusable:
        raise PolicyError(
            f"policy {policy.name!r} returned budget {k!r:.80} for {request.reusable} reusable tokens",
            "a budget is a whole number from 0 to the number of reusable tokens",
        )
    return int(k)


def checked_schedule(policy: Policy, k: int, reusable: int, layers: int) -> tuple[int, ...] | None:
    """The policy's tokens for each layer, None for k at each. Raises PolicyError, naming the policy, for one that
    breaks the contract."""
    given = policy.schedule(k, reusable, layers)
    if given is None:
        return None
    counts = list(given)
    what = None
    if len(counts) != layers or not all(map(_is_whole, counts)):
        what = f"is no list of {layers} whole numbers"
    elif counts != sorted(counts, reverse=True):
        what = "rises from one layer to the next"
    elif counts[0] > reusable or counts[-1] < 0:
        what = f"leaves the range from 0 to {reusable}"
    elif sum(counts) != k * layers:
        what = f"sums to {sum(counts)}, not to {k} tokens at each of {layers} layers"
    if what is not None:
        raise PolicyError(
            f"policy {policy.name!r}: its schedule {what}", "a schedule spends the same budget as any other policy"
        )
    return tuple(map(int, counts))


def checked_selection(policy: Policy, context: SelectionContext) -> Positions:
    """The policy's selection, ascending. Raises PolicyError, naming the policy, when it breaks the contract."""
    chosen = np.asarray(policy.select(context))
    if chosen.ndim != 1 or (chosen.size and not np.issubdtype(chosen.dtype, np.integer)):
        raise _broken(policy, context, f"returned {chosen.dtype} of shape {chosen.shape}, not positions")
    chosen = np.sort(chosen.astype(np.int64))
    if len(chosen) != context.k:
        raise _broken(policy, context, f"returned {len(chosen)} positions, not k = {context.k}")
    if np.any(chosen[1:] == chosen[:-1]):
        raise _broken(policy, context, "returned a position twice")
    if not np.isin(chosen, context.positions, assume_unique=True).all():
        raise _broken(policy, context, "returned a position that is not reusable")
    return chosen


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _broken(policy: Policy, context: SelectionContext, what: str) -> PolicyError:
    return PolicyError(
        f"policy {policy.name!r} {what} for request {context.request_id!r}",
        "a policy returns exactly k distinct reusable positions",
    )
