"""What a comparison of two policies on the same requests can see: power of the exact McNemar test, by its definition.

The number of discordant requests is binomial, and so is, given it, the number of those that point one way: power is a
sum over both, not an approximation and not a simulation (statsmodels has power for other tests, none for McNemar's).
A test at 5 % on both sides, found with 80 % probability.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache

import numpy as np

from kvaudit.analysis.stats import ALPHA, Floats, independent

POWER = 0.8
_NEGLIGIBLE = 1e-12


@lru_cache(maxsize=1_024)
def smallest_difference(n: int, discordance: float, block: int = 1) -> float | None:
    """The smallest difference of fidelity that n requests would show; None when they would show none.

    A share `discordance` of requests differs between the two, or as many as the difference itself where that is more
    (then all of them point one way). Requests that share content count as `independent(n, block)`. The power rises with
    the difference, so every larger one would be seen as well.
    """
    from scipy.optimize import brentq

    count = independent(n, block)
    if paired_power(count, discordance, discordance) >= POWER:
        counts = _counts(count, count, discordance)
        critical = _critical(counts)

        def excess(difference: float) -> float:
            return _mean(_found(counts, critical, difference / discordance), counts, count, discordance) - POWER

        return float(brentq(excess, 0.0, discordance, xtol=1e-7))
    if paired_power(count, 1.0, 1.0) < POWER:
        return None
    return float(brentq(lambda d: paired_power(count, d, d) - POWER, discordance, 1.0, xtol=1e-7))


@lru_cache(maxsize=1_024)
def requests_needed(difference: float, discordance: float, overlap: int = 1) -> int | None:
    """Requests from which on such a difference of fidelity would be seen; None when it is no difference.

    `discordance` as for `smallest_difference`. `overlap`: requests that share content and so count as one, as they all
    do in a long stream (`stats.block_length`). The power of an exact test does not rise steadily with the number of
    requests: this is the smallest number from which on it never falls below 80 % again.
    """
    if not 0 < difference <= 1:
        return None
    discordance = max(difference, discordance)
    about = _about(difference, discordance)
    fewest, most = max(1, about * 6 // 7 - 30), about * 7 // 6 + 60
    counts = _counts(fewest, most, discordance)
    found = _found(counts, _critical(counts), difference / discordance)

    # The power rises steadily where one more discordant request never finds less: so it does for the envelopes of
    # `found`, and only between the crossings of both can the power itself be now above and now below its mark.
    def first_above(envelope: Floats) -> int:
        numbers = range(fewest, most)
        return fewest + bisect_left(numbers, True, key=lambda n: _mean(envelope, counts, n, discordance) >= POWER)

    first = first_above(np.maximum.accumulate(found))
    last = first_above(np.minimum.accumulate(found[::-1])[::-1])
    below = np.flatnonzero(_powers(first, last, found, counts, discordance) < POWER)
    return overlap * (first + (int(below[-1]) + 1 if len(below) else 0))


def paired_power(n: int, difference: float, discordance: float) -> float:
    """The probability that an exact McNemar test on n independent requests finds the difference."""
    if n == 0 or discordance == 0:
        return 0.0
    counts = _counts(n, n, discordance)
    return _mean(_found(counts, _critical(counts), difference / discordance), counts, n, discordance)


def _about(difference: float, discordance: float) -> int:
    """The number of requests by the normal test (Miettinen 1968), with its continuity correction."""
    from scipy.stats import norm

    spread = math.sqrt(discordance - difference**2)
    root = norm.ppf(1 - ALPHA / 2) * math.sqrt(discordance) + norm.ppf(POWER) * spread
    return int((root / difference) ** 2 + 1 / difference) + 1


def _counts(fewest: int, most: int, discordance: float) -> Floats:
    """The numbers of discordant requests that are possible, short of 1e-12, among so many requests: float64 [M]."""
    from scipy.stats import binom

    low, high = binom.ppf(_NEGLIGIBLE, fewest, discordance), binom.isf(_NEGLIGIBLE, most, discordance)
    return np.arange(max(0, low), high + 1, dtype=np.float64)


def _critical(counts: Floats) -> Floats:
    """How many of so many discordant requests may point the rarer way for the exact test to be significant, or -1."""
    from scipy.stats import binom

    critical = binom.ppf(ALPHA / 2, counts, 0.5)
    return np.asarray(critical - (2 * binom.cdf(critical, counts, 0.5) > ALPHA))


def _found(counts: Floats, critical: Floats, lean: float) -> Floats:
    """The probability that the exact test is significant, by the number of discordant requests.

    `lean` is the difference over the discordance: 1 where all discordant requests point one way.
    """
    from scipy.stats import binom

    rarer = (1 - lean) / 2
    return np.asarray(binom.cdf(critical, counts, rarer) + binom.sf(counts - critical - 1, counts, rarer))


def _mean(found: Floats, counts: Floats, n: int, discordance: float) -> float:
    """Power of n requests: `found` averaged over how many of them are discordant."""
    from scipy.stats import binom

    return float(binom.pmf(counts, n, discordance) @ found)


def _powers(first: int, last: int, found: Floats, counts: Floats, discordance: float) -> Floats:
    """Power of `first` to `last` requests.

    `given` is the power where so many discordant requests come on top of those among the `first`; a further request is
    one of them or is not.
    """
    from scipy.stats import binom

    among = counts[: np.searchsorted(counts, binom.isf(_NEGLIGIBLE, first, discordance)) + 1]
    more = int(binom.isf(_NEGLIGIBLE, last - first, discordance)) if last > first else 0
    reachable = np.pad(found, (0, more), mode="edge")[: len(among) + more]
    given = np.correlate(reachable, binom.pmf(among, first, discordance), "valid")
    powers = [given[0]]
    for _ in range(first, last):
        given = (1 - discordance) * given + discordance * np.append(given[1:], given[-1])
        powers.append(given[0])
    return np.array(powers)
