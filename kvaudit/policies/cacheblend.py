"""CacheBlend as its own repository has it (github.com/YaoJiayi/CacheBlend)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvaudit.policies import Need, Policy, Positions, SelectionContext
from kvaudit.policies.ranking import top_k


@dataclass(frozen=True, slots=True)
class CacheBlend(Policy):
    """The k tokens whose values deviate most, chosen once, at the check layer.

    Source: `vllm_blend/vllm/attention/backends/xformers.py`, where the squared difference of values is summed over
    heads and head dimensions and the suffix is left out, and `models/llama.py` (one check layer, the second; 16 %).
    Differs from `token-topk` in values for keys, whatever the engine's own switch says. The repository computes
    chunks in isolation and puts the suffix among the rows: that is the engine's side (`--like cacheblend`).
    """

    name: ClassVar[str] = "cacheblend"
    needs: ClassVar[frozenset[Need]] = frozenset({"value-deviation"})

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[top_k(context.value_deviation(), context.k)]
