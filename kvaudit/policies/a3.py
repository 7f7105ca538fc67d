"""A3, attention-aware accurate KV cache fusion (arXiv:2511.17560)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Need, Policy, Positions, SelectionContext
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class A3(Policy):
    """The k tokens with most attention from the question, at the check layer.

    Source: the paper's abstract and summaries of it. They say that tokens are selected by the question's attention
    over chunks whose positions are restored, and neither at which layers nor how heads and rows are put together: as
    described, it cannot be told apart from `prophetkv`. Assumed here, so that the two are not the same: the question's
    attention takes the place of CacheBlend's deviation, at the same single layer and recomputing from there on, mean
    over query rows and heads. What the other layers add is then the difference to `prophetkv`, what the last one
    alone does `fusionrag`.
    """

    name: ClassVar[str] = "a3"
    needs: ClassVar[frozenset[Need]] = frozenset({"query-attention"})

    def select(self, context: SelectionContext) -> Positions:
        attention = context.query_attention().mean(axis=0, dtype=np.float64)
        return context.positions[top_k(attention, context.k)]
