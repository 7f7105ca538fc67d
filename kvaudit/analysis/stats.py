"""The statistics of an audit: one function a procedure, each by scipy or statsmodels, over numpy arrays.

Intervals are 95 %. A result that is undefined is None, never NaN.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

ALPHA = 0.05
RESAMPLES = 5_000
MOST_BLOCKS = 500
"""Longer streams are resampled in at most this many blocks; a mean over them has the same bootstrap distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95 % interval, over n requests; `method` says how the interval was made."""

    value: float
    low: float | None
    high: float | None
    n: int
    method: str


def independent(n: int, block: int) -> int:
    """How many of n successive requests count as independent when those of a block share content."""
    return max(1, n // block) if n else 0


def wilson(successes: int, n: int, block: int = 1) -> Estimate | None:
    """A share with its Wilson score interval over independent blocks of requests; None when n is 0."""
    if n == 0:
        return None
    from statsmodels.stats.proportion import proportion_confint

    blocks, share = independent(n, block), successes / n
    low, high = proportion_confint(share * blocks, blocks, alpha=ALPHA, method="wilson")
    return Estimate(share, float(low), float(high), n, f"Wilson{_in_blocks(block)}")


def upper_bound_of_none(n: int) -> float:
    """Clopper-Pearson upper bound of a share of which n requests showed nothing (two-sided 95 %)."""
    from statsmodels.stats.proportion import proportion_confint

    return float(proportion_confint(0, n, alpha=ALPHA, method="beta")[1])


def smallest_visible(n: int) -> float | None:
    """The smallest share of affected requests of which n independent ones would show one with 95 % probability."""
    return 1 - ALPHA ** (1 / n) if n else None


def block_length(overlap: int, n: int) -> int:
    """How many successive requests are resampled together where windows overlap.

    As many as share content (`overlap`), but no more than leave 20 blocks, or n^(1/3) on a short stream (the usual
    rate for block bootstraps, Hall, Horowitz and Jing 1995), and never fewer than two blocks.
    """
    return max(1, min(overlap, max(math.ceil(math.cbrt(n)), n // 20), n // 2))


def mean_intervals(values: Floats, block: int, bounds: tuple[float, float], seed: int) -> list[Estimate | None]:
    """The mean of each row of [K, R] per-request values, with a bootstrap interval over requests.

    NaN marks a request that a row says nothing about. Requests are resampled in blocks of `block` neighbours of the
    stream, BCa (Efron 1987), percentile where BCa is undefined. A row in which every request has the same value gives
    the bootstrap nothing to resample: its interval is the exact binomial one over independent blocks, which bounds the
    share of unseen requests that could have any other value within `bounds`.
    """
    known = ~np.isnan(values)
    estimates: list[Estimate | None] = [None] * len(values)
    varied: dict[bytes, list[int]] = {}
    for row, mask in enumerate(known):
        present = values[row, mask]
        if len(present) and np.ptp(present) == 0:
            estimates[row] = _constant(float(present[0]), len(present), block, bounds)
        elif len(present):
            varied.setdefault(mask.tobytes(), []).append(row)
    for rows in varied.values():
        present = values[rows][:, known[rows[0]]]
        for row, estimate in zip(rows, _bootstrapped(present, block, seed), strict=True):
            estimates[row] = estimate
    return estimates


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Exact McNemar test on the discordant counts: how often only the first, and only the second, was right."""
    from statsmodels.stats.contingency_tables import mcnemar

    return float(mcnemar([[0, only_first], [only_second, 0]], exact=True).pvalue)


def cochran(right: Flags) -> tuple[float, float] | None:
    """Cochran's Q and its p-value over [requests, conditions]; None when no request tells the conditions apart."""
    from statsmodels.stats.contingency_tables import cochrans_q

    told_apart = right.any(axis=1) & ~right.all(axis=1)
    if right.shape[1] < 2 or not told_apart.any():
        return None
    result = cochrans_q(right[told_apart].astype(np.int64))
    return float(result.statistic), float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment over a family of p-values."""
    if not p_values:
        return []
    from statsmodels.stats.multitest import multipletests

    return [float(p) for p in multipletests(list(p_values), alpha=ALPHA, method="holm")[1]]


def requests_for_fidelity(value: float, limit: float, overlap: int = 1) -> int | None:
    """Requests whose Wilson lower bound would reach the limit at this fidelity; None when no number would.

    The lower bound L of the score interval solves (p - L)^2 = z^2 L (1 - L) / n. `overlap`: requests that share
    content and so count as one, as they all do in a long stream (`block_length`).
    """
    if value <= limit:
        return None
    return overlap * max(1, math.ceil(_z() ** 2 * limit * (1 - limit) / (value - limit) ** 2))


def requests_for_variation(estimate: Estimate, limit: float, overlap: int = 1) -> int | None:
    """Requests whose upper bound would keep the limit at this answer variation; None when no number would.

    The interval shrinks with the square root of n; with no variation seen the bound is Clopper-Pearson's, in which
    `overlap` requests that share content count as one.
    """
    if estimate.high is None or estimate.value >= limit:
        return None
    unseen = overlap * (max(1, math.ceil(math.log(ALPHA / 2) / math.log1p(-limit))) if limit < 1 else 1)
    if estimate.value == 0:
        return unseen
    width = (estimate.high - estimate.value) / (limit - estimate.value)
    return max(unseen, math.ceil(estimate.n * width**2))


def chance_of_reproducing(agree: Flags) -> float:
    """How likely the repeat control agrees everywhere if answers varied from run to run and not with the order.

    `agree` [runs, runs]: which runs gave equal answers to all requests, the repeat among them, True on the diagonal.
    If whole runs were exchangeable, any two of them could be the chronological one and its repeat: the share of pairs
    of runs that agree, an exact randomisation p-value of 'the repeat reproduces all answers'.
    """
    runs = len(agree)
    return float((agree.sum() - runs) / (runs * (runs - 1))) if runs > 1 else 1.0


def _constant(value: float, n: int, block: int, bounds: tuple[float, float]) -> Estimate:
    unseen = upper_bound_of_none(independent(n, block))
    low, high = bounds
    method = f"exact binomial (Clopper-Pearson){_in_blocks(block)}"
    return Estimate(value, value - unseen * (value - low), value + unseen * (high - value), n, method)


def _in_blocks(block: int) -> str:
    return f", requests counted in blocks of {block}, since their windows overlap" if block > 1 else ""


def _bootstrapped(values: Floats, block: int, seed: int) -> list[Estimate]:
    """Means with intervals of rows without NaN, each with at least two different values."""
    n = values.shape[1]
    block = max(min(block, n // 2), math.ceil(n / MOST_BLOCKS))
    starts = np.linspace(0, n, n // block + 1).astype(np.int64)
    sums, sizes = np.add.reduceat(values, starts[:-1], axis=1), np.diff(starts).astype(np.float64)
    low, high = _interval(sums, sizes, "BCa", seed)
    undefined = ~(np.isfinite(low) & np.isfinite(high))
    if undefined.any():
        low[undefined], high[undefined] = _interval(sums[undefined], sizes, "percentile", seed)
    over = "requests" if block == 1 else f"blocks of {block} requests"
    return [
        Estimate(
            float(row.mean()),
            float(bounds[0]),
            float(bounds[1]),
            n,
            f"{'percentile' if fallen_back else 'BCa'} bootstrap over {over}, {RESAMPLES} resamples",
        )
        for row, bounds, fallen_back in zip(values, zip(low, high, strict=True), undefined, strict=True)
    ]


def _interval(sums: Floats, sizes: Floats, method: str, seed: int) -> tuple[Floats, Floats]:
    from scipy.stats import bootstrap

    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore")  # BCa's undefined rows are answered by the percentile interval
        found = bootstrap(
            (sums, np.broadcast_to(sizes, sums.shape)),
            _ratio,
            paired=True,
            axis=-1,
            n_resamples=RESAMPLES,
            batch=max(1, 4_000_000 // sums.size),
            method=method,
            confidence_level=1 - ALPHA,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return np.atleast_1d(found.low).copy(), np.atleast_1d(found.high).copy()


def _ratio(sums: Floats, sizes: Floats, axis: int = -1) -> Any:
    return sums.sum(axis=axis) / sizes.sum(axis=axis)


def _z() -> float:
    from scipy.stats import norm

    return cast(float, norm.ppf(1 - ALPHA / 2))
