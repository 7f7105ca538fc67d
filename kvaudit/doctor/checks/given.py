"""Selection under control: recompute these positions and no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import BudgetContext, Need, Policy, Positions, SelectionContext


@dataclass(frozen=True, slots=True)
class Given(Policy):
    """Recomputes those of `positions` that are reusable, whatever the ratio."""

    positions: tuple[int, ...] = ()

    name: ClassVar[str] = "given"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def budget(self, request: BudgetContext) -> int:
        return len(self._among(request.positions))

    def select(self, context: SelectionContext) -> Positions:
        return self._among(context.positions)

    def _among(self, reusable: Positions) -> Positions:
        return np.intersect1d(np.asarray(self.positions, dtype=np.int64), reusable)
