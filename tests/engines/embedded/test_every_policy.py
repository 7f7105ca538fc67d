"""Every registered policy through the embedded engine, under both masks: one table, a tiny model, a small history."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from blend_cases import Wrapped, engine_of, prompt_of

from kvaudit.engines import PRESETS, Mask
from kvaudit.plugins import BUILT_IN, load
from kvaudit.policies import (
    Floats,
    Policy,
    Positions,
    SelectionContext,
    checked_selection,
    ratio_budget,
)
from kvaudit.records import Prompt, Sampling, Served

HISTORY = (
    "i0 s0 d0 s0 d1 s0 q0",
    "i0 s0 d1 s0 d3 s0 q1",
    "i0 s0 d3 s0 d2 s0 d0 s0 d1 s0 q0",
    "i0 s0 d1 s0 d0 s0 d3 s0 q1",
)
RATIO = 0.35
MADE: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in BUILT_IN["policies"]} | {
    "legolink:k=2": ("legolink", {"k": 2}),
    "cacheblend-gradual:first=1.9,layers=1": ("cacheblend-gradual", {"first": 1.9, "layers": 1}),
    "cacheclip:group=2": ("cacheclip", {"group": 2}),
    "oracle:span=3": ("oracle", {"span": 3}),
}
OWN_BUDGET = ("none", "all", "legolink:k=2")


@dataclass(frozen=True)
class Watched(Wrapped):
    """A policy, and what it was asked and answered at each stage of each request."""

    policy: Policy
    stages: list[tuple[SelectionContext, Positions]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.policy.name

    def select(self, context: SelectionContext) -> Positions:
        chosen = checked_selection(self.policy, context)
        self.stages.append((context, chosen))
        return chosen


def auxiliary_attention(prompt: Prompt, start: int, end: int) -> Floats:
    """As a model of two heads, the same for the same prompt."""
    weights = np.random.default_rng(list(prompt.token_ids)).random((2, len(prompt.token_ids)), dtype=np.float32)
    return weights / weights.sum(axis=1, keepdims=True)


def served(made: str, preset: str, mask: Mask) -> tuple[list[Served], list[list[tuple[SelectionContext, Positions]]]]:
    name, parameters = MADE[made]
    engine = engine_of(replace(PRESETS[preset], mask=mask), RATIO)
    engine.blender.auxiliary = auxiliary_attention
    answers, asked = [], []
    for index, words in enumerate(HISTORY):
        policy = Watched(load("policies", name)(**parameters))
        answers.append(engine.serve(f"r{index}", "request", prompt_of(words), Sampling(3), policy))
        asked.append(policy.stages)
    engine.close()
    return answers, asked


@pytest.mark.parametrize("mask", ["exact", "bottom-right"])
@pytest.mark.parametrize("preset", ["lmcache", "cache-craft"])
@pytest.mark.parametrize("made", MADE)
def test_realises_its_budget_within_what_is_reusable_and_reproduces(made: str, preset: str, mask: Mask) -> None:
    answers, asked = served(made, preset, mask)
    assert any(answer.reusable_tokens for answer in answers[1:])
    for answer, stages in zip(answers, asked, strict=True):
        assert answer.recomputed_tokens == answer.budget_k
        if made not in OWN_BUDGET:
            assert answer.budget_k == ratio_budget(answer.reusable_tokens, RATIO)
        assert bool(stages) == (answer.budget_k > 0)
        selected = [p for start, end in (answer.selection.spans if answer.selection else ()) for p in range(start, end)]
        if stages:
            first, last = stages[0], stages[-1]
            assert len(first[0].positions) == answer.reusable_tokens
            assert set(selected) <= set(first[0].positions.tolist())
            assert selected == last[1].tolist()
            for (_, before), (context, _) in pairwise(stages):
                assert context.positions.tolist() == before.tolist(), "only survivors are ranked again"
        else:
            assert selected == []
    again, asked_again = served(made, preset, mask)
    for answer, other in zip(answers, again, strict=True):
        assert replace(answer, ttft_ms=0, total_ms=0) == replace(other, ttft_ms=0, total_ms=0)
    for stages, others in zip(asked, asked_again, strict=True):
        assert [chosen.tolist() for _, chosen in stages] == [chosen.tolist() for _, chosen in others]


def test_the_table_asks_for_every_signal_that_there_is() -> None:
    """So that a policy whose signal the engine lacks fails above, and none goes untested."""
    asked = {need for name in BUILT_IN["policies"] for need in load("policies", name).needs}
    assert asked >= {
        "deviation",
        "value-deviation",
        "query-attention",
        "auxiliary-attention",
        "written-attention",
        "output-kl",
    }


def test_the_gradual_filter_is_asked_at_layers_where_it_falls() -> None:
    _, asked = served("cacheblend-gradual", "cache-craft", "exact")
    layers = [[context.layer for context, _ in stages] for stages in asked if stages]
    assert any(len(stages) > 1 for stages in layers)
    assert all(stages[0] == PRESETS["cache-craft"].check_layer for stages in layers)
    sizes = [[len(chosen) for _, chosen in stages] for stages in asked]
    assert all(size == sorted(size, reverse=True) for size in sizes)


def test_every_chunk_that_is_a_hit_has_its_profile() -> None:
    _, asked = served("cache-craft", "cache-craft", "exact")
    contexts = [context for stages in asked for context, _ in stages]
    assert contexts
    for context in contexts:
        chunks = context.written_attention().chunks
        assert [chunk is not None for chunk in chunks] == [segment.hit for segment in context.segments]


@pytest.mark.parametrize("made", ["token-topk", "prophetkv"])
def test_signals_are_asked_where_selected_tokens_start(made: str) -> None:
    _, asked = served(made, "cache-craft", "exact")
    layers = {context.layer for stages in asked for context, _ in stages}
    assert layers == {0 if load("policies", made).start == "first-layer" else 1}
