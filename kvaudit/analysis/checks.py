"""What keeps an audit from a conclusion: every reason as a code and numbers. Words are the reports' business."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvaudit.analysis.compare import NO_ROW, Flags, Grid, Integers, Kind, Pair
from kvaudit.analysis.stats import Floats
from kvaudit.records import CHRONOLOGICAL, FULL_PREFILL

MAX_NOISE = 0.0

REASONS = MappingProxyType(
    {
        "reference-missing": "no full-prefill arm was planned",
        "noise-floor-missing": "no second full-prefill arm was planned",
        "control-missing": "the policy has no arm under a control (names)",
        "too-few-orders": "count orders, where two are needed",
        "arms-unfinished": "planned arms (names) have no observations yet",
        "unplanned-rows": "count observations of an arm or a request that the run did not plan",
        "requests-missing": "count requests have no observation in some arm (names)",
        "duplicates": "count observations repeat a request of their arm (names)",
        "errors": "count of total observations are errors or have no answer (arms: names)",
        "nothing-compared": "nothing could be compared (kinds of comparison: names)",
        "reference-reused": "count full-prefill answers reused cached tokens",
        "noise-floor": "full prefill disagreed with itself on count of total requests; the limit is a share",
        "repeat-differs": "the repeat control did not reproduce count of total answers",
        "nothing-reused": "no token was reused in any order",
        "reuse-unknown": "the engine did not say whether anything was reused",
        "cache-not-empty": "the cache was not empty at count starts (arms: names)",
        "cache-unverified": "nobody could say whether the cache was empty at count starts (arms: names)",
        "budget-missed": "count of total requests recomputed another number of tokens than the budget (arms: names)",
    }
)
STANDING = frozenset({"too-few-orders", "errors", "budget-missed"})
"""Reasons that keep an audit from a conclusion but leave what it saw standing: a gate can still fail on it."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a finding is inconclusive: a code of REASONS and its numbers."""

    code: str
    count: int | None = None
    total: int | None = None
    limit: float | None = None
    names: tuple[str, ...] = ()


def reference_reasons(grid: Grid, pairs: Sequence[Pair], max_noise: float) -> list[Reason]:
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
    reused = sum(int((grid.column("reused_tokens", arm) > 0).sum()) for arm in arms)
    if reused:
        reasons.append(Reason("reference-reused", reused))
    differing, total = _disagreement(pairs, "noise", FULL_PREFILL)
    if differing and differing / total > max_noise:
        reasons.append(Reason("noise-floor", differing, total, max_noise))
    return reasons


def policy_reasons(grid: Grid, pairs: Sequence[Pair], policy: str) -> list[Reason]:
    """What is wrong with one policy's arms."""
    reasons = []
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
    differing, total = _disagreement(pairs, "repeat", policy)
    if differing:
        reasons.append(Reason("repeat-differs", differing, total))
    reasons += _reuse_reasons(grid, orders)
    reasons += _cache_reasons(grid, arms)
    reasons += _budget_reasons(grid, arms)
    return reasons


def _arm_reasons(grid: Grid, arms: Sequence[int]) -> Iterator[Reason]:
    unfinished = [arm for arm in arms if not grid.arms[arm].finished]
    if unfinished:
        yield Reason("arms-unfinished", len(unfinished), len(arms), names=_names(grid, unfinished))
    finished = [arm for arm in arms if grid.arms[arm].finished]
    yield from _counted(grid, finished, "requests-missing", lambda arm: int((grid.rows[arm] == NO_ROW).sum()))
    yield from _counted(grid, arms, "duplicates", lambda arm: int(grid.duplicates[arm]))
    yield from _counted(grid, arms, "errors", lambda arm: int(grid.failed[_present(grid, arm)].sum()))


def _counted(grid: Grid, arms: Sequence[int], code: str, count: Callable[[int], int]) -> Iterator[Reason]:
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
    return tuple(kind for kind, name in needed if not _disagreement(pairs, kind, name)[1])


def _disagreement(pairs: Sequence[Pair], kind: Kind, policy: str) -> tuple[int, int]:
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
    for code, counts in (("cache-not-empty", dirty), ("cache-unverified", silent)):
        hit = [arm for arm, count in counts.items() if count]
        if hit:
            yield Reason(code, sum(counts.values()), names=_names(grid, hit))


def _starts(grid: Grid, arm: int, position: Floats) -> Flags:
    """The requests that an arm served from an empty cache: the first one, under reset every one."""
    served: Flags = np.not_equal(grid.rows[arm], NO_ROW)
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


def _present(grid: Grid, arm: int) -> Integers:
    """The rows of an arm's observations."""
    rows: Integers = grid.rows[arm]
    return rows[np.not_equal(rows, NO_ROW)]


def _names(grid: Grid, arms: Sequence[int]) -> tuple[str, ...]:
    return tuple(grid.arms[arm].arm_id for arm in arms)
