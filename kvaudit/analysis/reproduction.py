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
from kvaudit.analysis.stats import Flags, Floats

IMMATERIAL = 1e-3
"""Nats: a difference of log-probabilities that flips no greedy choice but a tie of float32 logits. Measured on
smollm2-135m: at most 2e-5 with an exact mask, 0.6 to 13 with a bottom-right one."""


def chance_of_reproducing(grid: Grid, policy: str) -> float | None:
    """How likely the policy's repeats agree everywhere by luck (`stats.chance_of_reproducing`); None without one.

    Over the requests that all of the policy's runs answered; 1 where there are none. Request by request, but of what
    was started anew for every arm by whole runs: which kernels a start chooses may change all that it answers.
    """
    orders, repeats = grid.find(policy), grid.find(policy, "repeat")
    runs = (*orders, *repeats)
    agreements = np.full((len(runs), len(runs), len(grid.request_ids)), EQUAL, np.int8)
    for a, b in combinations(range(len(runs)), 2):
        agreements[a, b] = agreements[b, a] = agreement(grid, runs[a], runs[b])
    answered = (agreements != NOT_COMPARABLE).all(axis=(0, 1))
    if len(runs) < 2 or not repeats:
        return None
    if not answered.any():
        return 1.0
    equal = agreements[:, :, answered] == EQUAL
    if grid.restarted:
        equal = equal.all(axis=2, keepdims=True)
    return stats.chance_of_reproducing(equal, min(len(repeats), len(orders)))


def rounding_matters(grid: Grid, policy: str) -> bool:
    """Whether what rounding chooses may change what the policy's requests are answered.

    It does not where the rounding controls show so: no answer of them changed, none of the reference answers became
    likelier or less likely by more than `IMMATERIAL`, and rounding chose tokens on as many requests of one as of any
    order without a control. Tokens whose cached KV is right change nothing when they are recomputed rightly.
    """
    decided = {arm: decided_by_rounding(grid, arm)[0] for arm in grid.find(policy)}
    shown = 0
    for control in grid.find(policy, "rounding"):
        for order in grid.find(policy, order=grid.arms[control].order):
            moved = np.abs(grid.column("reference_logprob", control) - grid.column("reference_logprob", order))
            if (agreement(grid, order, control) != EQUAL).any() or not (moved <= IMMATERIAL).all():
                return True
            shown = max(shown, decided_by_rounding(grid, control)[0])
            decided.pop(order, None)
    return not shown or shown < max(decided.values(), default=0)


def touched_by_rounding(grid: Grid, arm: int) -> Flags:
    """On which requests of an arm rounding may have decided an answer, by a selection of theirs or of an earlier one's:
    [R].

    From the first on of which it chose a token, or, where the policy ranks by signals and so has rounding controls, of
    which nobody looked though tokens were chosen. None where rounding does not matter.
    """
    policy = grid.arms[arm].policy
    columns = grid.columns(("position", "rounding_tokens", "budget_k"), arm)
    ranks = bool(grid.find(policy, "rounding"))
    unknown = ranks & np.isnan(columns["rounding_tokens"]) & (columns["budget_k"] > 0)
    decided = ((columns["rounding_tokens"] > 0) | unknown) & rounding_matters(grid, policy)
    touched: Flags = columns["position"] >= np.min(columns["position"], where=decided, initial=np.inf)
    return touched


def touched_orders(grid: Grid, policy: str) -> tuple[str, ...]:
    return tuple(grid.arms[arm].order for arm in grid.find(policy) if touched_by_rounding(grid, arm).any())


def proven_variation(grid: Grid, pairs: Sequence[Pair], policy: str) -> Floats:
    """The part of each request's answer variation that rounding cannot explain: float64 [R], the share of its
    comparable pairs of orders that differ and of which rounding had touched neither; 0 where none is comparable."""
    touched = {arm: touched_by_rounding(grid, arm) for arm in grid.find(policy)}
    differing, comparable = np.zeros((2, len(grid.request_ids)))
    for pair in pairs:
        if pair.kind == "orders" and pair.policy == policy:
            differing += pair.differs & ~touched[pair.left] & ~touched[pair.right]
            comparable += pair.comparable
    return differing / np.maximum(comparable, 1)


def decided_by_rounding(grid: Grid, arm: int) -> tuple[int, int]:
    """On how many requests of an arm rounding chose a recomputed token, and of how many that is known."""
    tokens = grid.column("rounding_tokens", arm)
    return int((tokens > 0).sum()), int((~np.isnan(tokens)).sum())
