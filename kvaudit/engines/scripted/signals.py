"""What a policy may ask for: made up, and the same for the same prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvaudit.errors import EngineError
from kvaudit.policies import Floats, Need, Positions, WrittenAttention

OFFERED: frozenset[Need] = frozenset({"deviation", "key-deviation", "value-deviation", "query-attention"})


@dataclass(frozen=True, slots=True)
class Signals:
    """Deviation that follows from token ids and positions, and nothing else."""

    precision = float(np.finfo(np.float32).eps)

    values: Floats

    def deviation(self) -> Floats:
        return self.values

    def key_deviation(self, layer: int) -> Floats:
        return self.values

    def value_deviation(self, layer: int) -> Floats:
        return self.values

    def query_attention(self, layer: int) -> Floats:
        return self.values[None] / np.float32(max(1.0, float(self.values.sum())))

    def auxiliary_attention(self) -> Floats:
        raise _not_there("auxiliary model")

    def written_attention(self) -> WrittenAttention:
        raise _not_there("saved attention")

    def norms(self, need: Need, layer: int) -> Floats:
        return np.ones_like(self.values)

    def output_kl(self, positions: Positions) -> float:
        raise _not_there("output distribution")


def _not_there(what: str) -> EngineError:
    return EngineError(f"engine 'scripted' has no {what}", "take the embedded engine")
