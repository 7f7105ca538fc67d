"""FusionRAG's online stage, query-guided selection (arXiv:2601.12904, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Need, Policy, Positions, SelectionContext, Start
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class FusionRAG(Policy):
    """The k tokens with most attention from the question in the last layer, summed over its rows.

    The paper multiplies the question's query matrix of the final layer with each chunk's keys of that layer, sums the
    columns and takes the top k over all chunks; below 15 % of the tokens. Assumed: heads are summed too, and the
    softmax is over all keys that a row sees, after a prefill of the question over the reused chunks. Unlike
    `prophetkv` no other layer counts. The offline stage, in which each chunk is encoded behind similar ones, is the
    engine's side and not reproduced: chunks are whatever the write-back discipline left.
    """

    name: ClassVar[str] = "fusionrag"
    needs: ClassVar[frozenset[Need]] = frozenset({"query-attention"})
    start: ClassVar[Start] = "first-layer"

    def select(self, context: SelectionContext) -> Positions:
        attention = context.query_attention(context.layers - 1).sum(axis=0, dtype=np.float64)
        return context.positions[top_k(attention, context.k)]
