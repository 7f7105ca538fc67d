"""What keeps an audit from a conclusion: every reason as a code and numbers. Words are the reports' business."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvaudit.analysis.compare import NO_ROW, Flags, Grid, Integers, Kind, Pair
from kvaudit.analysis.figures import empty_answers, variation_by_request
from kvaudit.analysis.limits import Limits
from kvaudit.analysis.reproduction import chance_of_reproducing, proven_variation, touched_orders
from kvaudit.analysis.stats import ALPHA, Floats, wilson
from kvaudit.records import AS_SERVED, CHRONOLOGICAL, FULL_PREFILL

ReasonCode = Literal[
    "reference-missing",
    "noise-floor-missing",
    "control-missing",
    "too-few-orders",
    "arms-unfinished",
    "unplanned-rows",
    "requests-missing",
    "duplicates",
    "errors",
    "answers-empty",
    "nothing-compared",
    "reference-reused",
    "reference-unverified",
    "noise-floor",
    "repeat-differs",
    "within-noise",
    "noise-possible",
    "cold-differs",
    "rounding-differs",
    "within-rounding",
    "nothing-reused",
    "reuse-unknown",
    "cache-not-empty",
    "cache-unverified",
    "budget-missed",
    "retried",
]
"""Why an audit has no conclusion; kvaudit.reports.words says each in a sentence with the reason's numbers."""
STANDING: frozenset[ReasonCode] = frozenset({"too-few-orders", "errors", "budget-missed"})
"""Reasons that keep an audit from a conclusion but leave what it saw standing: a gate can still fail on it."""
OF_ROUNDING: frozenset[ReasonCode] = frozenset({"rounding-differs", "within-rounding"})
"""Reasons that say nothing against an order that rounding did not touch."""
OF_VARIATION: frozenset[ReasonCode] = frozenset({"noise-possible"})
"""Reasons that say nothing against what an order's answers are: only against a change with the order."""
OF_REFERENCE: frozenset[ReasonCode] = frozenset({"reference-reused", "reference-unverified", "cold-differs"})
"""Reasons that say nothing against a change with the order, which needs no reference."""

MOST_EMPTY = 0.5
"""A larger share of empty full-prefill answers leaves too few to compare: that empty ones are equal shows little."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a finding is inconclusive: a code and its numbers."""

    code: ReasonCode
    count: int | None = None
    total: int | None = None
    limit: float | None = None
    names: tuple[str, ...] = ()


def reference_reasons(grid: Grid, pairs: Sequence[Pair], limits: Limits) -> list[Reason]:
    """What is wrong with the reference, and so with every policy's audit."""
    reasons = []
    arms = grid.find(FULL_PREFILL, order=CHRONOLOGICAL)[:1]
    repeats = grid.find(FULL_PREFILL, "repeat")
    if not arms:
        reasons.append(Reason("reference-missing"))
    if not repeats:
        reasons.append(Reason("noise-floor-missing"))
    if grid.strays:
        reasons.append(Reason("unplanned-rows", grid.strays))
    reasons += _arm_reasons(grid, (*arms, *repeats))
    for arm in arms:
        empty, answered = empty_answers(grid, arm)
        if answered and empty > MOST_EMPTY * answered:
            reasons.append(Reason("answers-empty", empty, answered))
    reused = sum(int((grid.column("reused_tokens", arm) > 0).sum()) for arm in arms)
    if reused:
        reasons.append(Reason("reference-reused", reused))
    unknown = sum(int(np.isnan(grid.column("reused_tokens", arm)[_served(grid, arm)]).sum()) for arm in arms)
    if unknown:
        reasons.append(Reason("reference-unverified", unknown))
    reasons += _retry_reasons(grid, (*arms, *repeats), limits.retried)
    differing, total = disagreement(pairs, "noise", FULL_PREFILL)
    if _beyond(limits.noise, differing, total):
        reasons.append(Reason("noise-floor", differing, total, limits.noise))
    return reasons


def policy_reasons(grid: Grid, pairs: Sequence[Pair], policy: str, limits: Limits, block: int) -> list[Reason]:
    """What is wrong with one policy's arms."""
    reasons, max_noise = [], limits.noise
    orders = grid.find(policy)
    if len(orders) < 2:
        reasons.append(Reason("too-few-orders", len(orders)))
    absent = tuple(control for control in ("reset", "repeat") if not grid.find(policy, control))
    if absent:
        reasons.append(Reason("control-missing", names=absent))
    arms = tuple(index for index, arm in enumerate(grid.arms) if arm.policy == policy)
    reasons += _arm_reasons(grid, arms)
    silent = _nothing_compared(pairs, policy, len(orders))
    if silent:
        reasons.append(Reason("nothing-compared", names=silent))
    differing, total = disagreement(pairs, "repeat", policy)
    if _beyond(max_noise, differing, total):
        reasons.append(Reason("repeat-differs", differing, total, max_noise))
    reasons += _noise_reasons(grid, pairs, policy, max_noise, block)
    reasons += _black_box_reasons(grid, pairs, policy)
    reasons += _cold_reasons(grid, pairs, policy, max_noise)
    reasons += _rounding_reasons(grid, pairs, policy, max_noise)
    reasons += _reuse_reasons(grid, orders)
    reasons += _cache_reasons(grid, arms)
    reasons += _budget_reasons(grid, arms)
    reasons += _retry_reasons(grid, arms, limits.retried)
    return reasons


def _noise_reasons(grid: Grid, pairs: Sequence[Pair], policy: str, max_noise: float, block: int) -> Iterator[Reason]:
    """Noise that the user tolerates must not explain the requests that vary.

    A request varies by noise alone when any later run of it differs from the first: at most once a further order, each
    time as often as two runs of the same order do. Of the noise floor and the repeat control the worse upper bound
    counts. Without any difference between runs of the same order there is no noise to explain anything, and noise
    beyond the limit is a reason of its own.
    """
    known = variation_by_request(grid, pairs, policy)
    known = known[~np.isnan(known)]
    varying = int((known > 0).sum())
    seen = [disagreement(pairs, "noise", FULL_PREFILL), disagreement(pairs, "repeat", policy)]
    tolerated = not any(_beyond(max_noise, *noise) for noise in seen)
    bounds = [estimate.high or 0.0 for noise in seen if noise[0] and (estimate := wilson(*noise, block))]
    if varying and bounds and tolerated:
        explained = min(1.0, (len(grid.find(policy)) - 1) * max(bounds))
        if varying / len(known) <= explained:
            yield Reason("within-noise", varying, len(known), explained)


def _black_box_reasons(grid: Grid, pairs: Sequence[Pair], policy: str) -> Iterator[Reason]:
    """What a black box does by itself is known by its answers alone: where the repeat control may have reproduced them
    by luck, so few changed, nothing else speaks for history.
    """
    flipped = int((variation_by_request(grid, pairs, policy) > 0).sum())
    if policy == AS_SERVED and flipped and not disagreement(pairs, "repeat", policy)[0]:
        chance = chance_of_reproducing(grid, policy)
        if chance is not None and chance > ALPHA:
            yield Reason("noise-possible", flipped, limit=chance)


def _cold_reasons(grid: Grid, pairs: Sequence[Pair], policy: str, max_noise: float) -> Iterator[Reason]:
    """A request that nothing came before, and of which nothing was cached, is full prefill. Where its answer is another
    one, the counter, the reset or the reference does not tell the truth.
    """
    differing, total = 0, 0
    resets = grid.find(policy, "reset")
    for pair in pairs:
        if pair.kind == "reference" and pair.right in resets:
            alone = np.isnan(grid.column("prelude_reused_tokens", pair.right))
            cold = grid.cold(pair.right) & alone & pair.comparable
            differing, total = differing + int((pair.differs & cold).sum()), total + int(cold.sum())
    if _beyond(max_noise, differing, total):
        yield Reason("cold-differs", differing, total)


def _rounding_reasons(grid: Grid, pairs: Sequence[Pair], policy: str, max_noise: float) -> Iterator[Reason]:
    """What rounding may explain is not history: that is what flips between orders which rounding had not touched.

    No statistic of the rounding controls decides: one token that rounding chose early can change all answers of a run.
    """
    differing, compared = disagreement(pairs, "rounding", policy)
    if not (variation_by_request(grid, pairs, policy) > 0).any():
        if _beyond(max_noise, differing, compared):
            yield Reason("rounding-differs", differing, compared, max_noise)
    elif touched_orders(grid, policy) and not proven_variation(grid, pairs, policy).any():
        yield Reason("within-rounding", differing, compared)


def _beyond(max_noise: float, differing: int, total: int) -> bool:
    return differing > 0 and differing / total > max_noise


def _arm_reasons(grid: Grid, arms: Sequence[int]) -> Iterator[Reason]:
    unfinished = [arm for arm in arms if not grid.arms[arm].finished]
    if unfinished:
        yield Reason("arms-unfinished", len(unfinished), len(arms), names=_names(grid, unfinished))
    finished = [arm for arm in arms if grid.arms[arm].finished]
    yield from _counted(grid, finished, "requests-missing", lambda arm: int((grid.rows[arm] == NO_ROW).sum()))
    yield from _counted(grid, arms, "duplicates", lambda arm: int(grid.duplicates[arm]))
    yield from _counted(grid, arms, "errors", lambda arm: int(grid.failed[_present(grid, arm)].sum()))


def _counted(grid: Grid, arms: Sequence[int], code: ReasonCode, count: Callable[[int], int]) -> Iterator[Reason]:
    counts = {arm: count(arm) for arm in arms}
    hit = [arm for arm, number in counts.items() if number]
    if hit:
        total = sum(len(_present(grid, arm)) for arm in arms)
        yield Reason(code, sum(counts.values()), total, names=_names(grid, hit))


def _nothing_compared(pairs: Sequence[Pair], policy: str, orders: int) -> tuple[str, ...]:
    """Kinds of comparison that the policy's audit needs and that compared no request."""
    needed: tuple[tuple[Kind, str], ...] = (
        ("reference", policy),
        *((("orders", policy),) if orders > 1 else ()),
        ("repeat", policy),
        ("noise", FULL_PREFILL),
    )
    return tuple(kind for kind, name in needed if not disagreement(pairs, kind, name)[1])


def disagreement(pairs: Sequence[Pair], kind: Kind, policy: str) -> tuple[int, int]:
    """Differing and comparable requests over all pairs of a kind."""
    mine = [pair for pair in pairs if pair.kind == kind and pair.policy == policy]
    return sum(int(pair.differs.sum()) for pair in mine), sum(int(pair.comparable.sum()) for pair in mine)


def _reuse_reasons(grid: Grid, orders: Sequence[int]) -> Iterator[Reason]:
    reused = [grid.column("reused_tokens", arm) for arm in orders if len(_present(grid, arm))]
    if not reused:
        return
    if all(np.isnan(column).all() for column in reused):
        yield Reason("reuse-unknown")
    elif not any((column > 0).any() for column in reused):
        yield Reason("nothing-reused")


def _cache_reasons(grid: Grid, arms: Sequence[int]) -> Iterator[Reason]:
    """Every start from an empty cache must show no entry and no hit, and must show it."""
    dirty, silent = {}, {}
    for arm in arms:
        if not grid.arms[arm].finished:
            continue
        columns = grid.columns(("position", "first_reused_tokens", "cache_entries_before"), arm)
        starts = _starts(grid, arm, columns["position"])
        first_reuse = columns["first_reused_tokens"][starts]
        entries = columns["cache_entries_before"][starts]
        dirty[arm] = int(((first_reuse > 0) | (entries > 0)).sum())
        silent[arm] = int((np.isnan(first_reuse) & np.isnan(entries)).sum()) if starts.any() else 1
    found: tuple[tuple[ReasonCode, dict[int, int]], ...] = (("cache-not-empty", dirty), ("cache-unverified", silent))
    for code, counts in found:
        hit = [arm for arm, count in counts.items() if count]
        if hit:
            yield Reason(code, sum(counts.values()), names=_names(grid, hit))


def _starts(grid: Grid, arm: int, position: Floats) -> Flags:
    """The requests that an arm served from an empty cache: the first one, under reset every one."""
    served = _served(grid, arm)
    return served if grid.arms[arm].control == "reset" else served & (position == 0)


def _budget_reasons(grid: Grid, arms: Sequence[int]) -> Iterator[Reason]:
    missed, total, hit = 0, 0, []
    for arm in arms:
        columns = grid.columns(("recomputed_tokens", "budget_k"), arm)
        realised, budget = columns["recomputed_tokens"], columns["budget_k"]
        both = ~np.isnan(realised) & ~np.isnan(budget)
        wrong = int((realised[both] != budget[both]).sum())
        missed, total = missed + wrong, total + int(both.sum())
        hit += [arm] if wrong else []
    if missed:
        yield Reason("budget-missed", missed, total, names=_names(grid, hit))


def _retry_reasons(grid: Grid, arms: Sequence[int], max_retried: float) -> Iterator[Reason]:
    """An arm in which too many requests were sent again has another history than it was meant to have."""
    retried = {arm: int((grid.column("attempts", arm) > 1).sum()) for arm in arms}
    hit = [arm for arm, count in retried.items() if count > max_retried * len(_present(grid, arm))]
    if hit:
        total = sum(len(_present(grid, arm)) for arm in hit)
        yield Reason("retried", sum(retried[arm] for arm in hit), total, max_retried, _names(grid, hit))


def _served(grid: Grid, arm: int) -> Flags:
    served: Flags = np.not_equal(grid.rows[arm], NO_ROW)
    return served


def _present(grid: Grid, arm: int) -> Integers:
    """The rows of an arm's observations."""
    rows: Integers = grid.rows[arm]
    return rows[np.not_equal(rows, NO_ROW)]


def _names(grid: Grid, arms: Sequence[int]) -> tuple[str, ...]:
    return tuple(grid.arms[arm].arm_id for arm in arms)
