"""What a policy may ask for inside LMCBlender: what is at hand there when it selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from kvaudit.errors import EngineError
from kvaudit.policies import Floats, Need, Positions, WrittenAttention

OFFERED: frozenset[Need] = frozenset({"deviation", "key-deviation", "value-deviation"})
"""The signals that LMCBlender shows at its check layer and below it."""

UNITS_OFF = {torch.float32: 10, torch.float16: 2, torch.bfloat16: 2}
"""How many units in the last place a token's key is off, as a vector, where only rounding is: measured on smollm2-135m
at the check layer, loaded against fresh, up to 6.8 in float32 (values 9.2) and 1.6 in bfloat16, of which turning keys
to where they stand now is up to 0.9. Contexts that really differ are 100,000 units away and more in float32."""


@dataclass(frozen=True, slots=True)
class Distances:
    """Of one layer, float32 [N]: squared L2 distances of fresh from loaded keys and values over all KV heads, and the
    norms of the fresh ones."""

    keys: Floats
    values: Floats
    key_norms: Floats
    value_norms: Floats

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, loaded_keys: Tensor, loaded_values: Tensor) -> Distances:
        return cls(_squared(keys, loaded_keys), _squared(values, loaded_values), _norms(keys), _norms(values))


class BlendSignals:
    """`kvaudit.policies.context.Signals` at LMCBlender's check layer; see `SelectionContext` for shapes and meanings.

    deviation: LMCache's own, [N]. keys, values: fresh, [N, KV heads x head dim]. below: of the layers below.
    """

    def __init__(
        self,
        layer: int,
        deviation: Tensor,
        keys: Tensor,
        values: Tensor,
        loaded_values: Tensor,
        below: Mapping[int, Distances],
    ) -> None:
        self._layer, self._below = layer, below
        self._device_deviation, self._keys = deviation, keys
        self._values, self._loaded_values = values, loaded_values
        self._made: dict[str, Floats] = {}

    def deviation(self) -> Floats:
        if "keys" not in self._made:
            deviation = _to_host(self._device_deviation)
            if not torch.isfinite(self._device_deviation).all():
                raise EngineError("LMCache's token deviation is not finite", "try --dtype float32 or bfloat16")
            self._made["keys"] = _frozen(deviation)
        return self._made["keys"]

    def deviation_as_recorded(self) -> Floats:
        """A copy, whatever the policy asked for."""
        return _to_host(self._device_deviation)

    def key_deviation(self, layer: int) -> Floats:
        return self.deviation() if layer == self._layer else self._below[layer].keys

    def value_deviation(self, layer: int) -> Floats:
        if layer != self._layer:
            return self._below[layer].values
        if "values" not in self._made:
            self._made["values"] = _frozen(_squared(self._values, self._loaded_values))
        return self._made["values"]

    @property
    def precision(self) -> float:
        return UNITS_OFF[self._keys.dtype] * torch.finfo(self._keys.dtype).eps

    def norms(self, need: Need, layer: int) -> Floats:
        values = need == "value-deviation"
        if layer != self._layer:
            return self._below[layer].value_norms if values else self._below[layer].key_norms
        return _norms(self._values if values else self._keys)

    def query_attention(self, layer: int) -> Floats:
        _absent("query attention")

    def auxiliary_attention(self) -> Floats:
        _absent("auxiliary attention")

    def written_attention(self) -> WrittenAttention:
        _absent("the attention of written chunks")

    def output_kl(self, positions: Positions) -> float:
        _absent("the output's KL")


def _absent(what: str) -> NoReturn:
    raise EngineError(f"LMCBlender does not show {what}", "replay the policy on the embedded engine")


def _squared(fresh: Tensor, loaded: Tensor) -> Floats:
    return _to_host((fresh.float() - loaded.float()).square().sum(1))


def _norms(fresh: Tensor) -> Floats:
    return _to_host(fresh.float().square().sum(1).sqrt())


def _to_host(values: Tensor) -> Floats:
    made: Floats = values.detach().float().cpu().numpy().copy()
    return made


def _frozen(values: Floats) -> Floats:
    """Read-only: a policy that wrote into it would change what it is shown next."""
    values.flags.writeable = False
    return values
