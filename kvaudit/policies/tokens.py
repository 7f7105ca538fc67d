"""Policies that rank tokens one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvaudit.policies import Policy, Positions, SelectionContext
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class TokenTopK(Policy):
    """The k largest deviations, the lower position first among equals (CacheBlend in LMCache; paper 2.2).

    A deviation that is not a number ranks below every other.
    """

    name: ClassVar[str] = "token-topk"

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[top_k(context.deviation, context.k)]
