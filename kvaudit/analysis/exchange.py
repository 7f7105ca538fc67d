"""A permutation test of whether values of a switch differ, over blocks of requests that saw all of them (pure)."""

from __future__ import annotations

from math import factorial
from typing import NamedTuple

import numpy as np

from kvaudit.analysis.stats import Floats, Integers


class Exchanged(NamedTuple):
    """A p-value, and the smallest one that the test could have given."""

    p_value: float
    smallest_p: float


def exchanged(events: Integers, trials: Integers, permutations: int, seed: int) -> Exchanged | None:
    """P-value of 'the switch has no effect': its values are exchanged within each block.

    `events` of `trials`, int64 [values, B]. The statistic is the variance between values of the mean over blocks of the
    share of events, over the blocks in which something was compared under every value. All exchanges are tried where
    there are no more than `permutations`, else so many random ones. None where fewer than two blocks can be compared.
    """
    from scipy.stats import permutation_test

    known = (trials > 0).all(axis=0)
    if not known.any():
        return None
    shares = events[:, known] / trials[:, known]
    smallest = smallest_p(len(shares), shares.shape[1], permutations)

    def spread(*samples: Floats, axis: int) -> Floats:
        means: Floats = np.array([sample.mean(axis=axis) for sample in samples])
        return np.asarray(means.var(axis=0), np.float64)

    if np.ptp(shares, axis=0).max() == 0:
        return Exchanged(1.0, smallest)
    if shares.shape[1] < 2:
        return None
    result = permutation_test(
        tuple(shares),
        spread,
        permutation_type="samples",
        n_resamples=permutations,
        alternative="greater",
        vectorized=True,
        batch=max(1, 2_000_000 // shares.size),
        rng=np.random.default_rng(seed),
    )
    return Exchanged(float(result.pvalue), smallest)


def smallest_p(values: int, blocks: int, permutations: int) -> float:
    """The smallest p-value that `exchanged` can give: to exchange values in all blocks alike leaves their spread as it
    is, and of random exchanges the observed one is counted with them."""
    exchanges = factorial(values) ** blocks
    return factorial(values) / exchanges if exchanges <= permutations else 1 / (permutations + 1)
