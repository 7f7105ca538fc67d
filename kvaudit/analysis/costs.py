"""What reuse cost and saved: observations to figures about time, budget, selection and damage short of a flipped
answer (DESIGN 3, Measures). What each figure is: `kvaudit.schema.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvaudit.analysis.compare import Grid
from kvaudit.analysis.figures import Figure
from kvaudit.analysis.stats import Floats
from kvaudit.records import FULL_PREFILL, REPRODUCTIONS

COLUMNS = (
    "kl",
    "reference_logprob",
    "fragmentation",
    "captured_deviation",
    "recomputed_tokens",
    "budget_k",
    "reused_tokens",
    "reusable_tokens",
    "prompt_tokens",
)


class Budget(NamedTuple):
    """Totals over the n requests of one arm."""

    n: int
    recomputed: float
    budget: float
    reusable: float


def cost_figures(grid: Grid) -> tuple[Figure, ...]:
    """Every figure about time, selections and budgets."""
    figures = [*_ttft(grid)]
    budgets: dict[tuple[str, str], list[Budget]] = {}
    for arm, planned in enumerate(grid.arms):
        if planned.policy == FULL_PREFILL or planned.control == "repeat":
            continue
        columns = grid.columns(COLUMNS, arm)
        place = (planned.policy, planned.order, planned.control)
        figures += _damage(columns, place)
        if planned.control in REPRODUCTIONS:
            continue
        figures += _selection(columns, place)
        figures += _tokens(columns, place)
        if not np.isnan(columns["recomputed_tokens"]).all():
            n = int((~np.isnan(columns["recomputed_tokens"])).sum())
            totals = (float(np.nansum(columns[name])) for name in ("recomputed_tokens", "budget_k", "reusable_tokens"))
            budgets.setdefault(place[1:], []).append(Budget(n, *totals))
    figures += _equal_over_policies(budgets)
    return tuple(figures)


def _ttft(grid: Grid) -> Iterator[Figure]:
    if grid.reference is None:
        return
    for policy in (FULL_PREFILL, *grid.policies):
        times = _times(grid, policy)
        known = times[~np.isnan(times)]
        if not len(known):
            continue
        control = "none"
        yield Figure("ttft_median", policy, control=control, value=float(np.median(known)), n=len(known))
        yield Figure("ttft_p95", policy, control=control, value=float(np.quantile(known, 0.95)), n=len(known))
        ratios = speedups(grid, policy)
        if len(ratios):
            yield Figure("ttft_speedup", policy, control=control, value=float(np.median(ratios)), n=len(ratios))


def speedups(grid: Grid, policy: str) -> Floats:
    """Full prefill's TTFT over the policy's, of every request the median over orders, warm-up left out: float64 [n].

    Requests without a time on either side are left out.
    """
    if grid.reference is None:
        return np.empty(0)
    times = _times(grid, policy)
    ratios = _warm_ttft(grid, grid.reference) / np.where(times > 0, times, np.nan)
    ratios = ratios[:, ~np.isnan(ratios).all(axis=0)]
    return np.nanmedian(ratios, axis=0) if ratios.size else np.empty(0)


def _times(grid: Grid, policy: str) -> Floats:
    """The policy's TTFT in every order, warm-up NaN: float64 [orders, R]."""
    arms = (grid.reference,) if policy == FULL_PREFILL and grid.reference is not None else grid.find(policy)
    return np.array([_warm_ttft(grid, arm) for arm in arms]).reshape(len(arms), len(grid.request_ids))


def _warm_ttft(grid: Grid, arm: int) -> Floats:
    columns = grid.columns(("ttft_ms", "position"), arm)
    return np.where(columns["position"] == 0, np.nan, columns["ttft_ms"])


def _damage(columns: dict[str, Floats], place: tuple[str, str, str]) -> Iterator[Figure]:
    for name in ("kl", "reference_logprob"):
        known = columns[name][np.isfinite(columns[name])]
        if len(known):
            yield Figure(f"{name}_mean", *place, value=float(known.mean()), n=len(known))
            yield Figure(f"{name}_median", *place, value=float(np.median(known)), n=len(known))


def _selection(columns: dict[str, Floats], place: tuple[str, str, str]) -> Iterator[Figure]:
    for name in ("fragmentation", "captured_deviation"):
        known = columns[name][~np.isnan(columns[name]) & (columns["reusable_tokens"] != 0)]
        if len(known):
            low, middle, high = (float(value) for value in np.quantile(known, (0.25, 0.5, 0.75)))
            yield Figure(name, *place, value=middle, low=low, high=high, n=len(known), test="quartiles")


def _tokens(columns: dict[str, Floats], place: tuple[str, str, str]) -> Iterator[Figure]:
    for metric, name in (("recomputed_tokens", "recomputed_tokens"), ("budget_tokens", "budget_k")):
        known = columns[name][~np.isnan(columns[name])]
        if len(known):
            yield Figure(metric, *place, value=float(known.sum()), n=len(known))
    reused, prompt = columns["reused_tokens"], columns["prompt_tokens"]
    known_reuse = ~np.isnan(reused) & ~np.isnan(prompt)
    if prompt[known_reuse].sum() > 0:
        share = float(reused[known_reuse].sum() / prompt[known_reuse].sum())
        yield Figure("reuse_share", *place, value=share, n=int(known_reuse.sum()))


def _equal_over_policies(budgets: dict[tuple[str, str], list[Budget]]) -> Iterator[Figure]:
    for (order, control), totals in budgets.items():
        compared = [total for total in totals if _is_partial(total)]
        if len(compared) > 1 and len({total.n for total in compared}) == 1:
            equal = len({total.recomputed for total in compared}) == 1
            yield Figure("recomputed_equal", None, order, control, value=float(equal), n=len(compared))


def _is_partial(total: Budget) -> bool:
    return 0 < total.budget < total.reusable or total.reusable == 0 < total.budget
