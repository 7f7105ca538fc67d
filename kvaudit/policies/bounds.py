"""The two bounds between which every policy lies: recompute nothing, recompute everything reusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvaudit.policies import BudgetContext, Need, Policy, Positions, SelectionContext


@dataclass(frozen=True, slots=True)
class ReuseAll(Policy):
    """Reuse as it is: no reusable token is recomputed, whatever the ratio."""

    name: ClassVar[str] = "none"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def budget(self, request: BudgetContext) -> int:
        return 0

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[:0]


@dataclass(frozen=True, slots=True)
class RecomputeAll(Policy):
    """r = 1, whatever the ratio: with an exact mask and recomputed gaps this equals full prefill."""

    name: ClassVar[str] = "all"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def budget(self, request: BudgetContext) -> int:
        return request.reusable

    def select(self, context: SelectionContext) -> Positions:
        return context.positions
