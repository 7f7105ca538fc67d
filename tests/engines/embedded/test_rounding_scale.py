"""How far rounding moves what policies rank by: the lengths that the engine gives, and how far it really goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from blend_cases import engine_of, prompt_of

from kvaudit.engines import PRESETS, EngineSettings, Switches
from kvaudit.engines.embedded import open_engine
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.signals import UNITS_OFF
from kvaudit.plugins import load
from kvaudit.policies import Need, Policy, Positions, SelectionContext
from kvaudit.policies.rounding import watched
from kvaudit.prompts import Prompts
from kvaudit.records import Sampling
from kvaudit.traces import read_trace

FIXTURE = Path(__file__).parents[3] / "fixtures" / "rolling.jsonl.gz"


@dataclass
class Norms(Policy):
    heard: list[tuple[Positions, dict[tuple[Need, int], np.ndarray]]] = field(default_factory=list)
    name: ClassVar[str] = "norms"
    needs: ClassVar[frozenset[Need]] = frozenset({"deviation", "key-deviation", "value-deviation"})

    def select(self, context: SelectionContext) -> Positions:
        asked = [(need, layer) for need in self.needs for layer in range(context.layer + 1)]
        asked = [(need, layer) for need, layer in asked if need != "deviation" or layer == context.layer]
        found = {(need, layer): context.signals.norms(need, layer) for need, layer in asked}
        self.heard.append((context.positions, found))
        return context.positions[: context.k]


@pytest.mark.parametrize("ranked", ["key", "value"])
@pytest.mark.parametrize("check_layer", [1, 2])
def test_norms_are_those_of_what_full_prefill_computes_up_to_the_check_layer(check_layer: int, ranked: str) -> None:
    engine = engine_of(Switches("exact", "zero", "any", "first-writer", "after", ranked, check_layer))  # type: ignore[arg-type]
    policy = Norms()
    engine.prefill("r0", "request", prompt_of("i0 s0 d0 s0 d1 s0 d3 s0 q0"), policy)
    prompt = prompt_of("i0 s0 d1 s0 d0 s0 d3 s0 q1")
    full = engine.prefill("full", "request", prompt, None)
    states = {"key-deviation": full.keys.clone(), "value-deviation": full.values.clone()}
    states["deviation"] = states[f"{ranked}-deviation"]
    engine.prefill("r1", "request", prompt, policy)
    ((positions, found),) = policy.heard
    for (need, layer), norms in found.items():
        expected = states[need][layer][:, positions].transpose(0, 1).flatten(1).norm(dim=1)
        assert norms.dtype == np.float32
        np.testing.assert_allclose(norms, expected.numpy(), rtol=1e-4, err_msg=f"{need} at layer {layer}")


def test_what_asking_again_takes_is_no_part_of_ttft() -> None:
    class Slow(Policy):
        name = "slow"

        def select(self, context: SelectionContext) -> Positions:
            time.sleep(0.5)
            self.untimed_seconds += 0.5
            return context.positions[: context.k]

    engine, policy = engine_of(PRESETS["ideal"]), Slow()
    engine.serve("r0", "request", prompt_of("i0 s0 d0 s0 d1 q0"), Sampling(1), policy)
    served = engine.serve("r1", "request", prompt_of("i0 s0 d1 s0 d0 q0"), Sampling(1), policy)
    assert policy.untimed_seconds == 0.5
    assert served.ttft_ms is not None
    assert served.ttft_ms < 400


def test_watching_changes_no_choice() -> None:
    prompts = [prompt_of(words) for words in ("i0 s0 d0 s0 d1 s0 d3 q0", "i0 s0 d1 s0 d0 s0 d3 q1", "i0 s0 d3 d1 q0")]

    def chosen(policy: Policy) -> list[list[int]]:
        engine = engine_of(PRESETS["lmcache"])
        return [engine.prefill(f"r{i}", "request", each, policy).selected.tolist() for i, each in enumerate(prompts)]

    for name in ("token-topk", "random-token", "cacheblend-gradual", "prophetkv"):
        assert chosen(watched(load("policies", name)(), follow=False)) == chosen(load("policies", name)())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def roots(engine: EmbeddedEngine, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For the first requests of the fixture, backwards: each reusable token's deviation and how long its key is, both
    as a length."""
    seen = []

    class Looks(Policy):
        name = "looks"

        def select(self, context: SelectionContext) -> Positions:
            seen.append((np.sqrt(context.deviation), context.signals.norms("deviation", context.layer)))
            return context.positions[-context.k :]

    prompts, policy = Prompts(engine.tokenizer), Looks()
    for request in reversed(read_trace(FIXTURE).requests[:count]):
        for prompt in prompts.prelude(request):
            engine.prefill(request.request_id, "prelude", prompt, policy)
        engine.prefill(request.request_id, "request", prompts.request(request), policy)
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_on_the_real_model_rounding_is_within_its_units_and_other_contexts_are_far_beyond() -> None:
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(roots(open_engine(EngineSettings(device="cpu")), 3))
    unit = torch.finfo(torch.float32).eps
    least, most, rounded = np.inf, 0.0, 0
    for (one, norms), (two, _) in zip(*found, strict=True):
        for root in (one, two):
            units = root / norms / unit
            by_rounding = units < 100
            rounded += int(by_rounding.sum())
            most = max(most, units[by_rounding].max(initial=0))
            least = min(least, units[~by_rounding].min(initial=np.inf))
        assert (abs(one - two) / norms / unit).max() <= 2 * UNITS_OFF[torch.float32]
    assert rounded > 10, "tokens whose context is that of their chunk deviate by rounding alone"
    assert most <= UNITS_OFF[torch.float32]
    assert least > 1000
