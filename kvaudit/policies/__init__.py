"""The contract of a recomputation policy. One family a file beside this one, one line each in `plugins.py`.

A policy sees one request at the selection layer and returns which reusable tokens to recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvaudit.errors import PolicyError

Positions = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A prompt segment as a policy sees it: positions [start, end); `hit` when its KV came out of the cache."""

    kind: str
    content_id: str
    start: int
    end: int
    hit: bool


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """One request at the selection layer. N reusable tokens, n prompt tokens, H query heads.

    positions: int64 [N], ascending prompt positions of the reusable tokens.
    deviation: float32 [N], squared L2 distance between a token's current key and its cached key moved to the
        current position, summed over all KV heads, at `layer`.
    k: how many positions to return. Always 0 <= k <= N.
    token_ids: int64 [n], the whole prompt.
    segments: the prompt's tiling, in order.
    rng: seeded by (run seed, request id); a policy holds no state of its own between requests.
    value_deviation(): float32 [N], as `deviation` but over values.
    query_attention(): float32 [H, N], softmax attention of the last segment's tokens over the cached keys of the
        reusable tokens at `layer`, mean over those query rows.
    """

    request_id: str
    layer: int
    k: int
    positions: Positions
    deviation: Floats
    token_ids: Positions
    segments: Sequence[SegmentView]
    rng: np.random.Generator
    value_deviation: Callable[[], Floats]
    query_attention: Callable[[], Floats]


class Policy(Protocol):
    """`budget` turns N reusable tokens and the recompute ratio into k, 0 <= k <= N; `select` returns k distinct
    positions."""

    @property
    def name(self) -> str: ...

    def budget(self, reusable: int, ratio: float) -> int: ...

    def select(self, context: SelectionContext) -> Positions: ...


def ratio_budget(reusable: int, ratio: float) -> int:
    """k = max(1, floor(r N)), and 0 when nothing is reusable (LMCache's rule; paper 2.2, equation 2)."""
    return min(reusable, max(1, math.floor(ratio * reusable))) if reusable else 0


def checked_budget(policy: Policy, reusable: int, ratio: float) -> int:
    """The policy's k. Raises PolicyError, naming the policy, unless it is a whole number from 0 to `reusable`."""
    k = policy.budget(reusable, ratio)
    whole = isinstance(k, int | np.integer) and not isinstance(k, bool)
    if not whole or not 0 <= k <= reusable:
        raise PolicyError(
            f"policy {policy.name!r} returned budget {k!r:.80} for {reusable} reusable tokens",
            "a budget is a whole number from 0 to the number of reusable tokens",
        )
    return int(k)


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


def _broken(policy: Policy, context: SelectionContext, what: str) -> PolicyError:
    return PolicyError(
        f"policy {policy.name!r} {what} for request {context.request_id!r}",
        "a policy returns exactly k distinct reusable positions",
    )
