"""The oracle: spans chosen by what they do to the output, at any cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Need, Policy, Positions, SelectionContext
from kvaudit.policies.parameters import at_least
from kvaudit.policies.ranking import Numbers, Spans, by_mean, filled, tiles


@dataclass(frozen=True, slots=True)
class Oracle(Policy):
    """Spans that most reduce the output's KL divergence from full prefill, one after the other.

    Candidates are the `candidates` spans of `span` tokens with the largest mean deviation, laid as those of
    `token-runs`. Each step takes the candidate with which the KL is smallest, given those taken before, the larger
    mean first on ties; the last one is cut to its best window. What the candidates cannot hold goes to the next spans
    by mean deviation: they should hold several times k, or there is little to choose from.

    A bound, not a method: it sees the full prefill that the others approximate. A request costs one full prefill and
    a pass for each candidate at each step, about candidates * k / span.
    """

    span: int = 16
    candidates: int = 24

    name: ClassVar[str] = "oracle"
    needs: ClassVar[frozenset[Need]] = frozenset({"deviation", "output-kl"})

    def __post_init__(self) -> None:
        at_least(self, "span", 1)
        at_least(self, "candidates", 1)

    def select(self, context: SelectionContext) -> Positions:
        deviation = context.deviation
        ranked = by_mean(tiles(context, self.span), deviation)
        first = _greedy(context, ranked[: self.candidates], deviation)
        return context.positions[filled(np.concatenate((first, ranked[self.candidates :])), deviation, context.k)]


def _greedy(context: SelectionContext, candidates: Spans, deviation: Numbers) -> Spans:
    """The candidates with those first that are to be taken, in the order in which they were chosen."""
    lengths = candidates[:, 1] - candidates[:, 0]
    taken: list[int] = []
    others = list(range(len(candidates)))
    # Where all of them fit, all are taken, whatever they do.
    while lengths[taken].sum() < context.k < lengths.sum():
        divergences = [_divergence(context, candidates[[*taken, i]], deviation) for i in others]
        taken.append(others.pop(int(np.argmin(divergences))))
    return candidates[[*taken, *others]]


def _divergence(context: SelectionContext, spans: Spans, deviation: Numbers) -> float:
    divergence = context.output_kl(np.sort(context.positions[filled(spans, deviation, context.k)]))
    return math.inf if math.isnan(divergence) else divergence
