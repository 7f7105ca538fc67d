"""The statistics of an audit: one function a procedure, each by scipy or statsmodels, over numpy arrays.

Intervals are 95 %. A result that is undefined is None, never NaN.
"""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Integers = NDArray[np.int64]

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


def in_blocks(block: int) -> str:
    """How requests that share content were counted; nothing where each counts for itself."""
    return f", requests counted in blocks of {block}, since their windows overlap" if block > 1 else ""


def wilson(successes: float, n: int, block: int = 1) -> Estimate | None:
    """A share with its Wilson score interval over independent blocks of requests; None when n is 0."""
    if n == 0:
        return None
    from statsmodels.stats.proportion import proportion_confint

    blocks, share = independent(n, block), successes / n
    low, high = proportion_confint(share * blocks, blocks, alpha=ALPHA, method="wilson")
    return Estimate(share, float(low), float(high), n, f"Wilson{in_blocks(block)}")


def upper_bound_of_none(n: int, alpha: float = ALPHA) -> float:
    """Clopper-Pearson upper bound of a share of which n requests showed nothing (two-sided)."""
    from statsmodels.stats.proportion import proportion_confint

    return float(proportion_confint(0, n, alpha=alpha, method="beta")[1])


def smallest_visible(n: int) -> float | None:
    """The smallest share of affected requests of which n independent ones would show one with 95 % probability."""
    return 1 - ALPHA ** (1 / n) if n else None


def block_length(overlap: int, n: int) -> int:
    """How many successive requests are resampled together where windows overlap.

    As many as share content (`overlap`), but no more than leave 20 blocks, or sqrt(n) on a short stream, and never
    fewer than two blocks. Shorter blocks than these, of n^(1/3) requests as for estimates of a variance, let tests and
    intervals miss their level where an answer hangs on a document that every neighbour shares (test_simulations).
    """
    return max(1, min(overlap, max(math.ceil(math.sqrt(n)), n // 20), n // 2))


def mean_intervals(values: Floats, block: int, bounds: tuple[float, float], seed: int) -> list[Estimate | None]:
    """The mean of each row of [K, R] per-request values, with a bootstrap interval over requests.

    NaN marks a request that a row says nothing about; all others lie within `bounds`, (0, 1) for shares and (-1, 1) for
    differences of shares. Requests are resampled in blocks of `block` neighbours of the stream, BCa (Efron 1987),
    percentile where BCa is undefined. A row in which every request has the same value gives the bootstrap nothing to
    resample: its interval is the exact binomial one over independent blocks, which bounds the share of unseen requests
    that could have any other value. Of few blocks a bootstrap's interval is too narrow: no bound is closer than that of
    `_careful`.
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
        for row, mine, estimate in zip(rows, present, _bootstrapped(present, block, seed), strict=True):
            estimates[row] = _wider(estimate, _careful(mine, block, bounds))
    return estimates


def median_interval(values: Floats) -> Estimate | None:
    """The median with its exact interval by order statistics (Conover 1999, 3.2); None without values, no interval
    where there are too few values for one."""
    if not len(values):
        return None
    from scipy.stats import quantile_test

    found = quantile_test(values, q=float(np.median(values)), p=0.5).confidence_interval(1 - ALPHA)
    low, high = (float(bound) if np.isfinite(bound) else None for bound in (found.low, found.high))
    return Estimate(float(np.median(values)), low, high, len(values), "order statistics (binomial)")


def fleiss_kappa(codes: Integers) -> float | None:
    """Fleiss' kappa (1971) of [requests, raters]: equal codes are equal categories. None where all are the same one.

    Without the table of requests by categories that statsmodels asks for: that has as many cells as squared requests
    where every request has an answer of its own.
    """
    requests, raters = codes.shape
    if not requests or raters < 2:
        return None
    agreeing = np.mean([(codes[:, a] == codes[:, b]).mean() for a, b in combinations(range(raters), 2)])
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    by_chance = float(shares @ shares)
    return float(1 - (1 - agreeing) / (1 - by_chance)) if len(shares) > 1 else None


def mcnemar_p(only_first: int, only_second: int, counted: float = 1.0) -> float:
    """Exact McNemar test on the discordant counts: how often only the first, and only the second, was right.

    Requests that share content are often wrong together: `counted` is the share of requests that count, and counts are
    rounded towards no difference.
    """
    from statsmodels.stats.contingency_tables import mcnemar

    more, fewer = math.floor(max(only_first, only_second) * counted), math.ceil(min(only_first, only_second) * counted)
    first, second = max(more, fewer), fewer
    return float(mcnemar([[0, first], [second, 0]], exact=True).pvalue)


def cochran(right: Flags, block: int = 1) -> tuple[float, float] | None:
    """Cochran's Q and its p-value over [requests, conditions]; None when no request tells the conditions apart.

    Q is that of `independent(requests, block)` requests with the same shares.
    """
    from scipy.stats import chi2
    from statsmodels.stats.contingency_tables import cochrans_q

    told_apart = right.any(axis=1) & ~right.all(axis=1)
    if right.shape[1] < 2 or not told_apart.any():
        return None
    result = cochrans_q(right[told_apart].astype(np.int64))
    statistic = float(result.statistic) * independent(len(right), block) / len(right)
    return statistic, float(chi2.sf(statistic, right.shape[1] - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment over a family of p-values."""
    if not p_values:
        return []
    from statsmodels.stats.multitest import multipletests

    gc.freeze()  # multipletests collects garbage each time, over everything that is loaded: a tenth of a second
    try:
        return [float(p) for p in multipletests(list(p_values), alpha=ALPHA, method="holm")[1]]
    finally:
        gc.unfreeze()


def upper_bound_of_mean(mean: float, n: int, block: int = 1) -> float:
    """An upper bound of a mean of shares whatever they are: Wilson's, and never below the one of no share at all."""
    none = upper_bound_of_none(independent(n, block))
    estimate = wilson(mean * n, n, block) if mean > 0 else None
    return none if estimate is None or estimate.high is None else max(estimate.high, none)


def paired_difference(
    only_first: float, only_second: float, n: int, block: int = 1, alpha: float = ALPHA
) -> Estimate | None:
    """The difference of two shares on the same n requests, first minus second, with an interval for gates.

    `only_first` and `only_second` count the requests on which only the one, and only the other, was right; where a
    request can have a share in part, they are the sums of positive and of negative differences, which is on the careful
    side. Over `independent(n, block)` requests.

    Each bound is the more careful one of the adjusted Wald interval with Laplace counts (Bonett and Price 2012, Journal
    of Educational and Behavioral Statistics 37:479) and the score interval (Tango 1998, Statistics in Medicine 17:891)
    with a continuity correction of half a request: each alone covers less than 97.5 % on one side where discordant
    requests all point one way. Together a bound covers at least 97.5 % where at most half of the requests are
    discordant, 96.5 % at worst where nearly all are. Without any discordant request the bounds are exact
    (Clopper-Pearson). None when n is 0.
    """
    if n == 0:
        return None
    blocks = independent(n, block)
    if only_first == only_second == 0:
        return _constant(0.0, n, block, (-1.0, 1.0), alpha)
    first, second = only_first * blocks / n, only_second * blocks / n
    bounds = [interval(first, second, blocks, _z(alpha)) for interval in (_adjusted_wald, _paired_score)]
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    method = f"adjusted Wald or score, the wider bound{in_blocks(block)}"
    return Estimate((only_first - only_second) / n, max(-1.0, low), min(1.0, high), n, method)


def chance_of_reproducing(agree: Flags, repeats: int = 1) -> float:
    """How likely every repeat agrees everywhere if answers varied from run to run and not with the order.

    `agree` [runs, runs, requests]: which runs gave equal answers to a request, True on the diagonal; `repeats`: how
    many of the runs are repeats, each of an order of its own among the others. If answers vary from run to run,
    independently from request to request, the runs of a request are exchangeable: any pairs of them could be the orders
    and their repeats. They agree as often as so many disjoint pairs drawn from all runs do; on all requests with the
    product. An exact randomisation p-value of 'the repeats reproduce all answers'. It does not exclude variation that
    moves many requests of a run at once.
    """
    runs = len(agree)
    if runs < 2:
        return 1.0
    varied = np.flatnonzero(~agree.all(axis=(0, 1)))
    first_alike = agree[:, :, varied].argmax(axis=0)
    total = _ways_to_pair((runs,), repeats)
    groups = (np.unique(alike, return_counts=True)[1].tolist() for alike in first_alike.T)
    return math.prod(_ways_to_pair(sizes, repeats) / total for sizes in groups)


def _ways_to_pair(alike: Iterable[int], pairs: int) -> int:
    """In how many ways so many disjoint pairs can be drawn, each within one of the groups of these sizes."""
    ways = [1] + [0] * pairs
    for size in alike:
        within = [math.perm(size, 2 * j) // (2**j * math.factorial(j)) for j in range(pairs + 1)]
        ways = [sum(ways[j] * within[drawn - j] for j in range(drawn + 1)) for drawn in range(pairs + 1)]
    return ways[pairs]


def _adjusted_wald(first: float, second: float, n: float, z: float) -> tuple[float, float]:
    first, second = (first + 1) / (n + 2), (second + 1) / (n + 2)
    half = z * math.sqrt((first + second - (first - second) ** 2) / (n + 2))
    return first - second - half, first - second + half


def _paired_score(first: float, second: float, n: float, z: float) -> tuple[float, float]:
    """The differences that Tango's score test, at the constrained maximum likelihood, does not refuse."""
    from scipy.optimize import brentq

    def excess(difference: float, direction: int) -> float:
        a, b = 2 * n, (2 * n - first + second) * difference - first - second
        second_only = (math.sqrt(max(0.0, b * b + 4 * a * second * difference * (1 - difference))) - b) / (2 * a)
        spread = math.sqrt(max(0.0, n * (2 * second_only + difference * (1 - difference))))
        return direction * (first - second - n * difference) - 0.5 - z * spread

    observed = (first - second) / n
    low = brentq(excess, -1.0, observed, args=(1,)) if excess(-1.0, 1) > 0 else -1.0
    high = brentq(excess, observed, 1.0, args=(-1,)) if excess(1.0, -1) > 0 else 1.0
    return float(low), float(high)


def _careful(values: Floats, block: int, bounds: tuple[float, float]) -> Estimate | None:
    """An interval of a mean that holds whatever values within `bounds` have this mean: of a share Wilson's, and never
    below the bound of no damage at all; of a difference `paired_difference`'s. None where a bootstrap of a share covers
    by itself, which is where requests are independent.
    """
    n = len(values)
    if bounds[0] < 0:
        rises, falls = float(values.clip(min=0).sum()), float(-values.clip(max=0).sum())
        return paired_difference(rises, falls, n, block)
    if block == 1:
        mean = float(values.mean())
        return Estimate(mean, mean, upper_bound_of_none(n), n, "exact binomial (Clopper-Pearson) of none")
    estimate = wilson(float(values.sum()), n, block)
    return estimate and replace(estimate, high=upper_bound_of_mean(estimate.value, n, block))


def _wider(estimate: Estimate, other: Estimate | None) -> Estimate:
    """The estimate with the lower of both lower bounds and the higher of both upper ones."""
    if other is None or None in (estimate.low, estimate.high, other.low, other.high):
        return estimate
    low, high = min(estimate.low, other.low), max(estimate.high, other.high)  # type: ignore[type-var]
    if (low, high) == (estimate.low, estimate.high):
        return estimate
    return replace(estimate, low=low, high=high, method=f"{estimate.method}, or {other.method}, the wider bound")


def _constant(value: float, n: int, block: int, bounds: tuple[float, float], alpha: float = ALPHA) -> Estimate:
    unseen = upper_bound_of_none(independent(n, block), alpha)
    low, high = bounds
    method = f"exact binomial (Clopper-Pearson){in_blocks(block)}"
    return Estimate(value, value - unseen * (value - low), value + unseen * (high - value), n, method)


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


@cache
def _z(alpha: float) -> float:
    from scipy.stats import norm

    return float(norm.ppf(1 - alpha / 2))
