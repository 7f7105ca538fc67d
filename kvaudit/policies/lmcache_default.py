"""LMCache's own selection, as it ships."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvaudit.policies import Policy, Positions, SelectionContext
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class LmcacheDefault(Policy):
    """LMCache selects for itself, and kvaudit only looks on.

    Where its signals are rounded otherwise (the rounding control), its rule is applied in its place: the k largest
    deviations of keys.
    """

    name: ClassVar[str] = "lmcache-default"
    engine: ClassVar[str | None] = "lmcache"

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[top_k(context.deviation, context.k)]
