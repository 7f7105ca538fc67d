"""Policies that rank tokens one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Policy, Positions, SelectionContext


@dataclass(frozen=True, slots=True)
class TokenTopK(Policy):
    """The k largest deviations, the lower position first among equals (CacheBlend in LMCache; paper 2.2).

    A deviation that is not a number ranks below every other.
    """

    name: ClassVar[str] = "token-topk"

    def select(self, context: SelectionContext) -> Positions:
        if not context.k:
            return context.positions[:0]
        deviation = np.where(np.isnan(context.deviation), -np.inf, context.deviation)
        smallest_chosen = np.partition(deviation, -context.k)[-context.k]
        above = np.flatnonzero(deviation > smallest_chosen)
        level = np.flatnonzero(deviation == smallest_chosen)[: context.k - len(above)]
        return context.positions[np.concatenate((above, level))]
