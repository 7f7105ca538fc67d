"""How far rounding decides what a policy selects.

Tokens whose cached KV is right differ from it by rounding alone, and a rule that ranks by deviation still ranks them.
Another number of threads, another device or another kernel ranks them otherwise. A watched policy is asked again with
every signal moved as far as such rounding may move it: what changes with it was decided by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from kvaudit.errors import PolicyError
from kvaudit.policies import (
    BudgetContext,
    ChunkAttention,
    Floats,
    Need,
    Policy,
    Positions,
    SelectionContext,
    Signals,
    WrittenAttention,
    checked_selection,
)

DRAWS = 8
"""How often a policy is asked again; once where it pays a pass of the model for each question. Of two tokens that only
rounding tells apart one draw misses half or more."""

WIDTH = 2.0
"""How much farther than `precision` signals are moved: values that are twice as far apart may change places."""

SCORES = 8.0
"""Attention scores and logits are about so large: an error of `precision` times that is one of their rounding."""


class Watched(Policy):
    """A policy that is asked again under other roundings of its signals.

    decided: how many positions it chose, so far, that some other rounding would not have chosen. Asking again costs
    `untimed_seconds`, which are no part of a request's TTFT. `follow`: whether the first of the other roundings is
    followed in place of what the policy was really shown (the rounding control).
    """

    def __init__(self, policy: Policy, *, follow: bool) -> None:
        self._policy, self._follow = policy, follow
        self.decided = 0
        self.untimed_seconds = 0.0

    @property
    def follows(self) -> bool:
        return self._follow

    @property
    def narrows(self) -> bool:
        return self._policy.narrows

    def budget(self, request: BudgetContext) -> int:
        return self._policy.budget(request)

    def schedule(self, k: int, reusable: int, layers: int) -> list[int] | None:
        schedule = self._policy.schedule(k, reusable, layers)
        return None if schedule is None else list(schedule)

    def select(self, context: SelectionContext) -> Positions:
        before, luck = _copied(self._policy), deepcopy(context.rng)
        shown = checked_selection(self._policy, context)
        began = perf_counter()
        others = []
        for signals in _roundings(replace(context, rng=luck), 1 if "output-kl" in self.needs else DRAWS):
            policy = _copied(before)
            others.append(_asked_again(policy, replace(context, signals=signals, rng=deepcopy(luck))))
            if self._follow and len(others) == 1:
                self._policy = policy
        self.decided += max(len(np.setdiff1d(shown, other)) for other in others)
        self.untimed_seconds += perf_counter() - began
        return others[0] if self._follow else shown


def _copied(policy: Policy) -> Policy:
    """A copy, so that what a policy remembers within a request is each question's own; itself where it holds what
    cannot be copied (a lock, an open file)."""
    try:
        return deepcopy(policy)
    except Exception:
        return policy


def _asked_again(policy: Policy, context: SelectionContext) -> Positions:
    """Its selection. Raises PolicyError that says that it was asked again: the first answer was right."""
    try:
        return checked_selection(policy, context)
    except Exception as error:
        told = error.message if isinstance(error, PolicyError) else f"{type(error).__name__}: {error}"
        raise PolicyError(
            f"policy {policy.name!r}, asked again with its signals rounded otherwise: {told}",
            "what it does must not hang on how a signal is rounded",
        ) from error


def watched(policy: Policy, *, follow: bool) -> Watched:
    class Twin(Watched):
        name, needs, start, engine = policy.name, policy.needs, policy.start, policy.engine

    return Twin(policy, follow=follow)


def is_watched(policy: Policy, *, follow: bool) -> bool:
    """Whether a policy ranks by signals. One that asks for the output's KL, a pass each time, is only watched where
    it is to `follow`."""
    return bool(policy.needs) and (follow or "output-kl" not in policy.needs)


def _roundings(context: SelectionContext, draws: int) -> list[_Rounded]:
    seeds = deepcopy(context.rng).integers(1 << 63, size=draws)
    return [_Rounded(context.signals, context.layer, np.random.default_rng(seed)) for seed in seeds.tolist()]


@dataclass(slots=True)
class _Rounded:
    """`Signals`, each moved within its rounding, by the same each time that it is asked for."""

    signals: Signals
    layer: int
    noise: np.random.Generator
    _made: dict[object, Floats] = field(default_factory=dict)
    _given: list[tuple[Floats, Floats]] = field(default_factory=list)

    @property
    def precision(self) -> float:
        return self.signals.precision

    def norms(self, need: Need, layer: int) -> Floats:
        return self.signals.norms(need, layer)

    def deviation(self) -> Floats:
        return self._distance("deviation", self.layer, self.signals.deviation)

    def key_deviation(self, layer: int) -> Floats:
        return self._distance("key-deviation", layer, lambda: self.signals.key_deviation(layer))

    def value_deviation(self, layer: int) -> Floats:
        return self._distance("value-deviation", layer, lambda: self.signals.value_deviation(layer))

    def query_attention(self, layer: int) -> Floats:
        return self._weights(("query-attention", layer), lambda: self.signals.query_attention(layer))

    def auxiliary_attention(self) -> Floats:
        return self._weights("auxiliary-attention", self.signals.auxiliary_attention)

    def written_attention(self) -> WrittenAttention:
        written = self.signals.written_attention()
        return WrittenAttention(
            self._weights("outside", lambda: written.outside),
            tuple(None if chunk is None else self._chunk(index, chunk) for index, chunk in enumerate(written.chunks)),
        )

    def output_kl(self, positions: Positions) -> float:
        key = ("output-kl", np.sort(positions).tobytes())
        if key not in self._made:
            divergence = np.array([self.signals.output_kl(positions)], dtype=np.float32)
            self._made[key] = self._squares(divergence, np.full(1, SCORES, dtype=np.float32))
        return float(self._made[key][0])

    def _distance(self, need: Need, layer: int, signal: Callable[[], Floats]) -> Floats:
        """One rounding where two names mean the same signal, so that a policy sees nothing that cannot be."""
        key = (need, layer)
        if key not in self._made:
            squared = signal()
            made = next((made for given, made in self._given if given is squared), None)
            if made is None:
                made = self._squares(squared, self.signals.norms(need, layer))
                self._given.append((squared, made))
            self._made[key] = made
        return self._made[key]

    def _squares(self, squared: Floats, size: Floats) -> Floats:
        """A squared distance between vectors of about this size, whose roots rounding moves by precision x size."""
        moved = np.sqrt(squared) + self._uniform(squared.shape) * size
        return _frozen(moved * moved)

    def _chunk(self, index: int, chunk: ChunkAttention) -> ChunkAttention:
        sums = np.array([chunk.inside, *chunk.over.values()], dtype=np.float32)
        inside, *over = self._weights(("chunk", index), lambda: sums).tolist()
        return ChunkAttention(inside, dict(zip(chunk.over, over, strict=True)))

    def _weights(self, key: object, signal: Callable[[], Floats]) -> Floats:
        """Softmax weights: an absolute error of a score is a relative one of its weight."""
        if key not in self._made:
            weights = signal()
            self._made[key] = _frozen(weights * (1 + self._uniform(weights.shape) * SCORES))
        return self._made[key]

    def _uniform(self, shape: tuple[int, ...]) -> Floats:
        width = WIDTH * self.precision
        return self.noise.uniform(-width, width, shape).astype(np.float32)


def _frozen(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> Floats:
    made: Floats = values.astype(np.float32)
    made.flags.writeable = False
    return made
