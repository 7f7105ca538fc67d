"""Which conditions no other beats: the Pareto frontier of fidelity, answer variation and speed (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvaudit.analysis.stats import Estimate

Standing = Literal["frontier", "within-intervals", "beaten", "unknown"]
"""frontier: no other is at least as good everywhere and better somewhere. within-intervals: beaten, but by none whose
intervals lie apart from its own. beaten: by one that is better beyond the intervals in at least one measure. unknown:
a measure is missing."""


@dataclass(frozen=True, slots=True)
class Point:
    """More fidelity and speed-up are better, less variation is. None: not measured, or not to be trusted."""

    fidelity: Estimate | None
    variation: Estimate | None
    speedup: Estimate | None

    @property
    def measures(self) -> tuple[Estimate, Estimate, Estimate] | None:
        """Fidelity, stability (one less the variation) and speed-up, more being better; None where one is missing."""
        if self.fidelity is None or self.variation is None or self.speedup is None:
            return None
        return self.fidelity, _complement(self.variation), self.speedup


def standings(points: Sequence[Point]) -> list[Standing]:
    """How each point stands among all. Points that lack a measure neither beat nor are beaten."""
    measured = [point.measures for point in points]
    known = [measures for measures in measured if measures is not None]
    return ["unknown" if mine is None else _standing(mine, known) for mine in measured]


def _standing(mine: Sequence[Estimate], others: Sequence[Sequence[Estimate]]) -> Standing:
    better = [other for other in others if _beats(other, mine)]
    if not better:
        return "frontier"
    apart = any(_is_above(theirs, own) for other in better for theirs, own in zip(other, mine, strict=True))
    return "beaten" if apart else "within-intervals"


def _beats(other: Sequence[Estimate], mine: Sequence[Estimate]) -> bool:
    pairs = [(theirs.value, own.value) for theirs, own in zip(other, mine, strict=True)]
    return all(theirs >= own for theirs, own in pairs) and any(theirs > own for theirs, own in pairs)


def _is_above(other: Estimate, mine: Estimate) -> bool:
    """Whether one interval lies wholly above another; an estimate without an interval is told apart from none."""
    return other.low is not None and mine.high is not None and other.low > mine.high


def _complement(share: Estimate) -> Estimate:
    low = None if share.high is None else 1 - share.high
    high = None if share.low is None else 1 - share.low
    return Estimate(1 - share.value, low, high, share.n, share.method)
