"""Embedded engines over tiny seeded models, with planted faults that no switch shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import EngineSettings, Rows, Switches
from kvaudit.engines.embedded.cache import ChunkCache, Entry
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import Weights, weights_of
from kvaudit.policies import Policy, Positions
from kvaudit.records import DOCUMENT, CacheState, Prompt


@cache
def tiny_weights(family: str, rope: str | None, seed: int) -> Weights:
    return weights_of(tiny_model(family, seed, rope), torch.float32, torch.device("cpu"))


def tiny_engine(
    switches: Switches,
    family: str = "llama",
    *,
    rope: str | None = None,
    seed: int = 1,
    kind: type[EmbeddedEngine] = EmbeddedEngine,
) -> EmbeddedEngine:
    settings = EngineSettings(recompute_ratio=0.3, switches=switches, device="cpu")
    return kind(tiny_weights(family, rope, seed), TinyTokenizer(), settings, {})


class Changed(EmbeddedEngine):
    """Shows rows as `changed` makes them of the true ones."""

    def rows(self, request_id: str, prompt: Prompt, policy: Policy, positions: Positions) -> Rows:
        return self.changed(super().rows(request_id, prompt, policy, positions), positions)

    def changed(self, rows: Rows, positions: Positions) -> Rows:
        raise NotImplementedError


class Noisy(Changed):
    """Every number that it shows is off by this much, relative, and never twice by the same."""

    LEVEL = 1e-4
    draws = np.random.default_rng(5)

    def changed(self, rows: Rows, positions: Positions) -> Rows:
        return replace(rows, keys=self._off(rows.keys), values=self._off(rows.values))

    def _off(self, states: np.ndarray) -> np.ndarray:
        size = np.abs(states).mean()
        return (states + size * self.LEVEL * self.draws.standard_normal(states.shape)).astype(np.float32)


class VeryNoisy(Noisy):
    LEVEL = 0.2


class Blank(Changed):
    def changed(self, rows: Rows, positions: Positions) -> Rows:
        return replace(rows, keys=np.full_like(rows.keys, np.nan), values=np.full_like(rows.values, np.nan))


class ZeroKeys(Changed):
    """The first two rows that are asked for lose their keys and keep their values."""

    def changed(self, rows: Rows, positions: Positions) -> Rows:
        keys = rows.keys.copy()
        keys[:, :4] = 0
        return replace(rows, keys=keys)


class Stubborn(Changed):
    """Says that it recomputed rows, and shows the same ones whatever stands around them."""

    shown: dict[int, Rows]

    def changed(self, rows: Rows, positions: Positions) -> Rows:
        self.shown = getattr(self, "shown", {})
        first = self.shown.setdefault(len(positions), rows)
        return replace(rows, keys=first.keys, values=first.values)


class LosesHalf(EmbeddedEngine):
    """Drops every second write, and says nothing of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cache = self.blender.cache = _EverySecond()


class _EverySecond(ChunkCache):
    def __init__(self) -> None:
        super().__init__()
        self._stored = 0

    def store(self, key: Any, states: torch.Tensor, **facts: Any) -> Entry:
        entry = super().store(key, states, **facts)
        self._stored += 1
        if self._stored % 2 == 0:
            self._removed(key)
        return entry


class LosesShort(EmbeddedEngine):
    """Drops chunks of fewer than 8 tokens that come behind a hit."""

    def serve(self, request_id: str, part: Any, prompt: Prompt, *rest: Any, **named: Any) -> Any:
        served = super().serve(request_id, part, prompt, *rest, **named)
        if served.reused_tokens:
            fresh = {write.write_ordinal for write in served.writes if write.tokens < 8}
            for entry in self.cache.entries():
                if entry.write_ordinal in fresh:
                    self.cache._removed(entry.key)
        return served


class LosesLonely(EmbeddedEngine):
    """Drops what a prompt of one chunk stored."""

    def serve(self, request_id: str, part: Any, prompt: Prompt, *rest: Any, **named: Any) -> Any:
        served = super().serve(request_id, part, prompt, *rest, **named)
        if sum(segment.kind == DOCUMENT for segment in prompt.segments) == 1:
            for entry in self.cache.entries():
                self.cache._removed(entry.key)
        return served


class KeepsItsCache(EmbeddedEngine):
    """Reports an empty cache after a reset and empties nothing."""

    def reset(self) -> CacheState:
        return CacheState(0, 0)


class AdmitsEntries(EmbeddedEngine):
    def reset(self) -> CacheState:
        super().reset()
        return CacheState(3, 4096)


class SaysNothing(EmbeddedEngine):
    """Does not know which token ids there are."""

    @property
    def capabilities(self) -> Any:
        return replace(super().capabilities, vocabulary_size=None)


def launches(*engines: Callable[[], EmbeddedEngine]) -> Callable[[], EmbeddedEngine]:
    """Opens these, one a launch; one more is an error."""
    waiting = list(engines)
    return lambda: waiting.pop(0)()
