"""The two bounds between which every policy lies: recompute nothing, recompute everything reusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvaudit.policies import Positions, SelectionContext


@dataclass(frozen=True, slots=True)
class ReuseAll:
    """Reuse as it is: no reusable token is recomputed, whatever the ratio."""

    name: ClassVar[str] = "none"

    def budget(self, reusable: int, ratio: float) -> int:
        return 0

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[:0]


@dataclass(frozen=True, slots=True)
class RecomputeAll:
    """r = 1, whatever the ratio: with an exact mask and recomputed gaps this equals full prefill."""

    name: ClassVar[str] = "all"

    def budget(self, reusable: int, ratio: float) -> int:
        return reusable

    def select(self, context: SelectionContext) -> Positions:
        return context.positions
