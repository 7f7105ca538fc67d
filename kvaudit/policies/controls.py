"""Controls that no paper has and that make the others meaningful: chance, the worst choice, and contiguity in steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Need, Policy, Positions, SelectionContext
from kvaudit.policies.parameters import at_least
from kvaudit.policies.ranking import by_mean, fill, tiles, top_k


@dataclass(frozen=True, slots=True)
class RandomToken(Policy):
    """k tokens by chance: what scattered recomputation gains without any signal."""

    name: ClassVar[str] = "random-token"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def select(self, context: SelectionContext) -> Positions:
        return context.rng.choice(context.positions, context.k, replace=False)


@dataclass(frozen=True, slots=True)
class RandomSpan(Policy):
    """The spans of `token-runs` with m = `length`, in a seeded random order, the last one cut at its end."""

    length: int = 16

    name: ClassVar[str] = "random-span"
    needs: ClassVar[frozenset[Need]] = frozenset()

    def __post_init__(self) -> None:
        at_least(self, "length", 1)

    def select(self, context: SelectionContext) -> Positions:
        spans = context.rng.permutation(tiles(context, self.length))
        return fill(context, spans, np.zeros(len(context.positions)))


@dataclass(frozen=True, slots=True)
class LeastDeviation(Policy):
    """The k smallest deviations: the worst that ranking by deviation could do, if deviation told what matters."""

    name: ClassVar[str] = "least-deviation"

    def select(self, context: SelectionContext) -> Positions:
        return context.positions[top_k(-context.deviation, context.k)]


@dataclass(frozen=True, slots=True)
class TokenRuns(Policy):
    """`token-topk` widened to runs of m neighbouring reusable tokens: from scattered to contiguous in steps.

    Runs lie side by side from the start of each chunk, the last of a chunk is shorter, and none crosses its border.
    They are taken by mean deviation while they fit; what is left of k is the best window in the first that does not.
    m = 1 is `token-topk`; m = 0 means whole chunks, as any m does that no chunk is longer than. That is
    `document-aligned`, but that zeroed gaps compete by their deviation here, for every m.
    """

    m: int = 4

    name: ClassVar[str] = "token-runs"

    def __post_init__(self) -> None:
        at_least(self, "m", 0)

    def select(self, context: SelectionContext) -> Positions:
        deviation = context.deviation
        return fill(context, by_mean(tiles(context, self.m), deviation), deviation)
