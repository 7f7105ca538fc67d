"""ProphetKV: the tokens that the query looks at (arXiv:2602.02579)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Need, Policy, Positions, SelectionContext, Start
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class ProphetKV(Policy):
    """The k tokens with most attention from the query's tokens, mean over query rows, heads and all layers.

    Source: a third-party port and the paper's two stages (attention of the query over the cached keys, then its mean
    over layers); ties go to the lower position. It differs from the port in two things: the softmax is over all keys
    that a row sees, the query's own among them, not over the context alone; and the prompt's first chunk may be
    selected, which the port serves from an exact prefix cache.
    """

    name: ClassVar[str] = "prophetkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"query-attention"})
    start: ClassVar[Start] = "first-layer"

    def select(self, context: SelectionContext) -> Positions:
        attention = np.zeros(len(context.positions))
        for layer in range(context.layers):
            attention += context.query_attention(layer).mean(axis=0, dtype=np.float64)
        return context.positions[top_k(attention, context.k)]
