"""Whether rows differ, held against the engine's own noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvaudit.doctor.checks.findings import Inconclusive
from kvaudit.policies import Floats

Array = Floats | NDArray[np.float64]

ROUNDING = float(np.finfo(np.float32).eps)
"""Rows are told in float32: nothing smaller can be seen."""

QUIET, PLAIN = 4.0, 32.0
"""A difference up to `QUIET` times the noise is none, one of `PLAIN` times the noise or more is there. In between
nothing is said."""


@dataclass(frozen=True, slots=True)
class Scale:
    """`noise` is the relative difference that the engine shows where nothing differs."""

    noise: float

    def differs(self, what: str, difference: float) -> bool:
        """Whether there is a difference. Raises Inconclusive for one that may be noise and may be none."""
        if difference <= QUIET * self.noise:
            return False
        if difference >= PLAIN * self.noise:
            return True
        raise Inconclusive(
            f"{what} is {difference:.1e}, too near to the engine's own noise of {self.noise:.1e}",
            {"difference": difference, "noise": self.noise},
        )

    def plain(self, difference: float) -> bool:
        return difference >= PLAIN * self.noise


def distance(left: Array, right: Array) -> float:
    """The L2 norm of the difference over that of `left`, the largest over the layers: both [L, ...]. 0 for no rows,
    infinite for rows that differ from zeros."""
    return max(map(_relative, left.astype(np.float64), right.astype(np.float64)), default=0.0)


def _relative(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    apart, size = float(np.linalg.norm(left - right)), float(np.linalg.norm(left))
    if not apart:
        return 0.0
    return apart / size if size else float("inf")
