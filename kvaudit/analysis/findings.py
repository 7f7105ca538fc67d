"""The finding per policy: what the audit saw, as codes and numbers (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvaudit.analysis import stats
from kvaudit.analysis.checks import (
    OF_REFERENCE,
    STANDING,
    Reason,
    ReasonCode,
    disagreement,
    policy_reasons,
    reference_reasons,
)
from kvaudit.analysis.compare import Grid, Pair
from kvaudit.analysis.figures import variation_by_request
from kvaudit.analysis.limits import Limits
from kvaudit.analysis.reproduction import (
    chance_of_reproducing,
    decided_by_rounding,
    proven_variation,
    rounding_matters,
    touched_orders,
)

Seen = Literal["history-sensitive", "none-seen", "inconclusive"]

EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """What the audit saw of one policy.

    reasons: why it is inconclusive; of one that is history-sensitive, why its fidelity is in doubt.
    compared: requests that were compared between orders; flipped: how many of them any two orders answered
    differently, with the first few as examples.
    own_losses: of reset_compared requests, how many the policy answers otherwise than full prefill even without
    history (reset control). reset_reuses: whether anything is reused there (preludes are served before their
    requests); if not, the control is full prefill and cannot tell the policy's own error from history.
    repeat_losses: of repeat_compared requests, how many the repeat control answers differently.
    rounding_matters: whether what rounding chooses may change an answer; it chose a recomputed token on
    rounding_decided of rounding_served requests, counted in every order. touched: the orders in which it may have
    decided an answer. flipped_untouched: how many requests flipped between orders that it had not touched by then;
    proven_variation: the answer variation that comes of these alone. rounding_losses: of rounding_compared requests,
    how many the rounding control answers differently.
    overlap: how many successive requests of the stream share content; block: how many of them count as one here.
    reused_share: of the prompts' tokens in all orders, how many came from a cache; None where unknown or none did.
    smallest_visible: the smallest share of affected requests that would have shown with 95 % probability.
    chance_of_reproducing: p-value of 'the repeat agreed by luck, answers vary from run to run'; None where it did not
    agree.
    """

    policy: str
    seen: Seen
    reasons: tuple[Reason, ...]
    compared: int
    flipped: int
    examples: tuple[str, ...]
    reset_compared: int
    own_losses: int
    reset_reuses: bool
    repeat_compared: int
    repeat_losses: int
    rounding_served: int
    rounding_decided: int
    rounding_matters: bool
    touched: tuple[str, ...]
    flipped_untouched: int
    proven_variation: float
    rounding_compared: int
    rounding_losses: int
    overlap: int
    block: int
    reused_share: float | None
    smallest_visible: float | None
    chance_of_reproducing: float | None

    def stands_but_for(self, codes: Collection[ReasonCode]) -> bool:
        """Whether what was seen stands, though it may be incomplete, where these reasons are seen to otherwise: a gate
        can fail on it."""
        return all(reason.code in STANDING or reason.code in codes for reason in self.reasons)

    @property
    def noise_excluded(self) -> bool:
        """Whether the requests that flipped are too many for noise that the repeat control missed by luck."""
        return self.chance_of_reproducing is None or self.chance_of_reproducing <= stats.ALPHA


def find(grid: Grid, pairs: Sequence[Pair], limits: Limits, overlap: int = 1) -> tuple[Finding, ...]:
    """The finding of every policy.

    `overlap`: how many successive requests share content (`figures.stream_overlap`).
    """
    shared = reference_reasons(grid, pairs, limits)
    return tuple(_finding(grid, pairs, policy, shared, limits, overlap) for policy in grid.policies)


def _finding(
    grid: Grid, pairs: Sequence[Pair], policy: str, shared: Sequence[Reason], limits: Limits, overlap: int
) -> Finding:
    block = stats.block_length(overlap, len(grid.request_ids))
    reasons = (*shared, *policy_reasons(grid, pairs, policy, limits, block))
    variation = variation_by_request(grid, pairs, policy)
    flipped = np.flatnonzero(variation > 0)
    compared = int((~np.isnan(variation)).sum())
    resets = [pair for pair in pairs if pair.kind == "reference" and pair.right in grid.find(policy, "reset")]
    repeat_losses, repeat_compared = disagreement(pairs, "repeat", policy)
    rounding_losses, rounding_compared = disagreement(pairs, "rounding", policy)
    proven = proven_variation(grid, pairs, policy)
    decided = [decided_by_rounding(grid, arm) for arm in grid.find(policy)]
    changed = len(flipped) > 0
    withheld = any(not (changed and reason.code in OF_REFERENCE) for reason in reasons)
    seen: Seen = "inconclusive" if withheld else "history-sensitive" if changed else "none-seen"
    return Finding(
        policy=policy,
        seen=seen,
        reasons=reasons,
        compared=compared,
        flipped=len(flipped),
        examples=tuple(grid.request_ids[int(index)].as_py() for index in flipped[:EXAMPLES]),
        reset_compared=sum(int(pair.comparable.sum()) for pair in resets),
        own_losses=sum(int(pair.differs.sum()) for pair in resets),
        reset_reuses=not any(map(grid.reuses_nothing, grid.find(policy, "reset"))),
        repeat_compared=repeat_compared,
        repeat_losses=repeat_losses,
        rounding_served=sum(served for _, served in decided),
        rounding_decided=sum(requests for requests, _ in decided),
        rounding_matters=rounding_matters(grid, policy),
        touched=touched_orders(grid, policy),
        flipped_untouched=int((proven > 0).sum()),
        proven_variation=float(proven.sum()) / max(1, compared),
        rounding_compared=rounding_compared,
        rounding_losses=rounding_losses,
        overlap=overlap,
        block=block,
        reused_share=_reused_share(grid, grid.find(policy)),
        smallest_visible=stats.smallest_visible(stats.independent(compared, block)),
        chance_of_reproducing=chance_of_reproducing(grid, policy) if len(flipped) and not repeat_losses else None,
    )


def _reused_share(grid: Grid, orders: Sequence[int]) -> float | None:
    columns = [grid.columns(("reused_tokens", "prompt_tokens"), arm) for arm in orders]
    reused = sum(float(np.nansum(column["reused_tokens"])) for column in columns)
    known = sum(float(np.nansum(column["prompt_tokens"][~np.isnan(column["reused_tokens"])])) for column in columns)
    return reused / known if reused and known else None
