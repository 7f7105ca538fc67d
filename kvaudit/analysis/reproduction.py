"""Whether what differs is history: runs of the same order again, and what rounding decides.

An arm is touched by rounding from the first request on of which, or of whose prelude, rounding chose a recomputed token
(`kvaudit.policies.rounding`): what it wrote into the cache may be another device's something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from kvaudit.analysis import stats
from kvaudit.analysis.compare import EQUAL, NOT_COMPARABLE, Grid, Pair, agreement
from kvaudit.analysis.stats import Flags


def chance_of_reproducing(grid: Grid, policy: str) -> float | None:
    """How likely the policy's repeat agrees everywhere by luck (`stats.chance_of_reproducing`); None without one.

    Over the requests that all of the policy's runs answered.
    """
    repeats = grid.find(policy, "repeat")
    agree, _ = agreements(grid, (*grid.find(policy), *repeats))
    return stats.chance_of_reproducing(agree) if repeats and agree.size else None


def chance_of_rounding(grid: Grid, policy: str) -> float | None:
    """How likely the policy's rounding controls differ so little from their orders, if orders differed by no more than
    rounding (`stats.chance_of_so_few`). None where no rounding control was touched by rounding, so that there is
    nothing to tell by.

    Over the requests that all of these runs answered and on which a control could differ: something was reusable in
    each run, and the controls were touched.
    """
    orders = {grid.arms[arm].order: arm for arm in grid.find(policy)}
    touched = {arm: touched_by_rounding(grid, arm) for arm in grid.find(policy, "rounding")}
    controls = [arm for arm, flags in touched.items() if flags.any() and grid.arms[arm].order in orders]
    runs = (*orders.values(), *controls)
    agree, requests = agreements(grid, runs)
    pairs = [(runs.index(orders[grid.arms[arm].order]), runs.index(arm)) for arm in controls]
    able = [grid.column("reusable_tokens", arm) != 0 for arm in runs] + [touched[arm] for arm in controls]
    return stats.chance_of_so_few(agree[:, :, np.all(able, axis=0)[requests]], pairs) if pairs else None


def touched_by_rounding(grid: Grid, arm: int) -> Flags:
    """On which requests of an arm rounding may have decided a selection, of theirs or of an earlier one's: [R].

    From the first on of which that is known, or, where the policy ranks by signals and so has rounding controls, of
    which nobody looked though tokens were chosen.
    """
    columns = grid.columns(("position", "rounding_tokens", "budget_k"), arm)
    ranks = bool(grid.find(grid.arms[arm].policy, "rounding"))
    unknown = ranks & np.isnan(columns["rounding_tokens"]) & (columns["budget_k"] > 0)
    decided = (columns["rounding_tokens"] > 0) | unknown
    touched: Flags = columns["position"] >= np.min(columns["position"], where=decided, initial=np.inf)
    return touched


def flipped_untouched(grid: Grid, pairs: Sequence[Pair], policy: str) -> int:
    """How many requests two orders answer differently that rounding had touched in neither."""
    touched = {arm: touched_by_rounding(grid, arm) for arm in grid.find(policy)}
    mine = [pair for pair in pairs if pair.kind == "orders" and pair.policy == policy]
    flipped = [pair.differs & ~touched[pair.left] & ~touched[pair.right] for pair in mine]
    return int(np.any(flipped, axis=0).sum()) if flipped else 0


def agreements(grid: Grid, arms: Sequence[int]) -> tuple[Flags, Flags]:
    """Which of these arms gave equal answers, [arms, arms, requests], over the requests that all of them answered; and
    which of the R requests these are."""
    found = np.full((len(arms), len(arms), len(grid.request_ids)), EQUAL, np.int8)
    for a, b in combinations(range(len(arms)), 2):
        found[a, b] = found[b, a] = agreement(grid, arms[a], arms[b])
    answered = (found != NOT_COMPARABLE).all(axis=(0, 1))
    agree: Flags = found[:, :, answered] == EQUAL
    return agree, answered


def decided_by_rounding(grid: Grid, arm: int) -> tuple[int, int]:
    """On how many requests of an arm rounding chose a recomputed token, and of how many that is known."""
    tokens = grid.column("rounding_tokens", arm)
    return int((tokens > 0).sum()), int((~np.isnan(tokens)).sum())
