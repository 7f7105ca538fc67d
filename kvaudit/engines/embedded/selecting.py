"""Asking a policy which reusable tokens to recompute: its budget, its schedule, and its choice at every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvaudit.engines.embedded.lookup import Found
from kvaudit.engines.embedded.signals import RequestSignals, Signals, Stage
from kvaudit.policies import (
    BudgetContext,
    Floats,
    Policy,
    Positions,
    SegmentView,
    SelectionContext,
    Written,
    checked_budget,
    checked_schedule,
    checked_selection,
)
from kvaudit.records import Prompt

NO_POSITIONS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Choice:
    """What a policy chose. Positions are int64, ascending.

    reusable: N positions; selected: those that are recomputed at every layer from `layer`, where the selection
    began, to the last. recomputed: how many are, mean over these layers. `measure` gives `deviation`.
    """

    budget: int
    layer: int
    reusable: Positions
    selected: Positions
    recomputed: int
    measure: Callable[[], Floats]

    @cached_property
    def deviation(self) -> Floats:
        """float32 [N] at the check layer. For a policy that saw none it is computed when it is first read."""
        return self.measure()


NOTHING_REUSABLE = Choice(0, 0, NO_POSITIONS, NO_POSITIONS, 0, lambda: np.empty(0, dtype=np.float32))


class Selector:
    """A policy over one request; `deviation` is what it saw of it at the check layer, over all reusable tokens."""

    def __init__(self, policy: Policy, request: RequestSignals, ratio: float, rng: np.random.Generator) -> None:
        mixed = request.mixed
        self.policy, self.request, self.rng = policy, request, rng
        self.segments = segment_views(mixed.prompt, mixed.found)
        reusable = mixed.span.reusable
        self.budget = checked_budget(policy, BudgetContext(len(reusable), ratio, self.segments, reusable))
        self._start, layers = mixed.start, mixed.transformer.layers - mixed.start
        schedule = checked_schedule(policy, self.budget, len(reusable), layers) if self.budget else None
        self._counts = schedule or (self.budget,) * layers
        self._token_ids = np.asarray(mixed.prompt.token_ids, dtype=np.int64)
        self._mixed = mixed
        self.deviation: Floats | None = None

    def selects_at(self, layer: int, left: Positions) -> bool:
        return layer == self._start or self._counts[layer - self._start] < len(left)

    def choose(self, stage: Stage) -> Positions:
        """The positions that are recomputed from the stage's layer on."""
        k = self._counts[stage.layer - self._start]
        if not k:
            return NO_POSITIONS
        signals = Signals(self.request, stage)
        chosen = checked_selection(self.policy, self._context(stage, k, signals))
        if stage.layer == self._start == self._mixed.switches.check_layer:
            self.deviation = signals.seen_deviation
        return chosen

    def _context(self, stage: Stage, k: int, signals: Signals) -> SelectionContext:
        return SelectionContext(
            policy=self.policy.name,
            request_id=self.request.request_id,
            layer=stage.layer,
            layers=self._mixed.transformer.layers,
            k=k,
            positions=stage.left,
            token_ids=self._token_ids,
            segments=self.segments,
            rng=self.rng,
            needs=self.policy.needs,
            signals=signals,
        )


def starting_layer(policy: Policy, check_layer: int) -> int:
    return 0 if policy.start == "first-layer" else check_layer


def segment_views(prompt: Prompt, found: Found) -> Sequence[SegmentView]:
    """The prompt's tiling, with the write behind every hit."""
    return [
        SegmentView(
            segment.kind,
            segment.content_id,
            segment.start,
            segment.end,
            entry is not None,
            None
            if entry is None
            else Written(
                entry.writer_request_id,
                entry.writer_part,
                entry.write_ordinal,
                entry.position,
                entry.context_hash,
                context,
                tuple(content_id for content_id, _ in entry.before),
            ),
        )
        for segment, entry, context in zip(prompt.segments, found.used, found.contexts, strict=True)
    ]
