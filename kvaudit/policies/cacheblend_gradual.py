"""CacheBlend's gradual filter, as its paper describes it (arXiv:2405.16444, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from kvaudit.policies import Policy, Positions, SelectionContext
from kvaudit.policies.parameters import at_least
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class CacheBlendGradual(Policy):
    """More than k tokens at the check layer; at each layer after it, those of the survivors that deviate most there.

    The paper: a share slightly higher than r at the first layer, slightly less at each next one, r on average. It
    gives no numbers and its repository has no gradual filter, so the shape is an assumption: `first` times k at the
    check layer, from there in equal steps over `layers` layers (None: down to the last), constant after them, at a
    level that makes k the average. `first` is lowered where there are not so many reusable tokens, or where the last
    layer would be left without a token: with k = 1, or one layer, it is `token-topk`.

    Ranks by the deviation that the engine's switch names, keys or values.
    """

    first: float = 1.5
    layers: int | None = None

    name: ClassVar[str] = "cacheblend-gradual"

    def __post_init__(self) -> None:
        at_least(self, "first", 1)
        if self.layers is not None:
            at_least(self, "layers", 1)

    def schedule(self, k: int, reusable: int, layers: int) -> Sequence[int] | None:
        falling = min(layers - 1, layers if self.layers is None else self.layers)
        if not k or not falling:
            return None
        # Of the area above the last level, as a share of one layer's at the first: 1 + (m - 1) / m + ... + 1 / m.
        above = Fraction(falling + 1, 2)
        first = Fraction(min(self.first * k, reusable))
        first = min(first, (k * layers - (layers - above)) / above)
        if first <= k:
            return None
        last = (k * layers - first * above) / (layers - above)
        return _rounded([last + (first - last) * Fraction(max(0, falling - i), falling) for i in range(layers)])

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[top_k(context.deviation, context.k)]


def _rounded(falling: Sequence[Fraction]) -> list[int]:
    """Whole numbers with the same sum, itself whole, by largest remainder, the earlier first: they fall as well."""
    whole = [int(count) for count in falling]
    by_remainder = sorted(range(len(whole)), key=lambda i: whole[i] - falling[i])
    for i in by_remainder[: int(sum(falling)) - sum(whole)]:
        whole[i] += 1
    return whole
