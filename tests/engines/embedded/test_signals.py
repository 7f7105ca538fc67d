"""What policies may ask the engine for, where they start and how they narrow: against the slow reference, and what each
costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from blend_cases import (
    CHUNK_LOOKUPS,
    TOKEN_BYTES,
    TOLERANCE,
    Drawn,
    Every,
    Pair,
    engine_of,
    every_switch,
    histories,
    looked_at,
    policy_named,
    prompt_of,
    words_drawn,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILY_SETTINGS

from kvaudit.engines import PRESETS, Deviation, Gap, Mask, Suffix, Switches, WriteBack
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.errors import EngineError, PolicyError
from kvaudit.policies import BudgetContext, Need, Policy, Positions, SelectionContext, Start
from kvaudit.records import Part, Prompt, Sampling

COMPARED: list[Need] = [need for need in get_args(Need) if need != "auxiliary-attention"]
"""The signals that the reference computes."""

TWICE = ("i0 s0 d0 s0 d1 s0 d3 s0 q0", "i0 s0 d1 s0 d0 s0 d3 s0 q1")
"""A prompt, and one whose chunks all come from it but the query."""


def drawn_policy(drawn: random.Random) -> Drawn:
    needs = frozenset(need for need in COMPARED if drawn.random() < 0.4)
    return Drawn(needs, drawn.choice(get_args(Start)), drawn.choice([(), (2,), (3, 1)]))


def drawn_switches(drawn: random.Random, write_back: WriteBack) -> Switches:
    mask, gap, lookup = map(drawn.choice, (get_args(Mask), get_args(Gap), CHUNK_LOOKUPS))
    return Switches(
        mask,
        gap,
        lookup,
        write_back,
        suffix=drawn.choice(get_args(Suffix)),
        deviation=drawn.choice(get_args(Deviation)),
        check_layer=drawn.randrange(3),
        capacity_bytes=drawn.choice([None, None, 12 * TOKEN_BYTES, 20 * TOKEN_BYTES]),
        keys=drawn.choice(["moved", "moved", "unmoved"]),
    )


def compare(drawn: random.Random, family: str, write_back: WriteBack) -> Counter[str]:
    """One drawn history under drawn policies, held against the reference; what came up in it."""
    pair = Pair(drawn_switches(drawn, write_back), drawn.choice([0.15, 0.4, 1.0]), family)
    seen = Counter[str]()
    for number, words in enumerate(words_drawn(drawn, 4)):
        policy = drawn_policy(drawn)
        got, _ = pair.prefill(f"r{number}", prompt_of(words), policy)
        if len(got.reusable):
            seen.update((policy.start, *policy.needs))
            seen["narrowed"] += len(got.selected) < got.choice.recomputed
            seen["rewritten"] += write_back == "last-writer" and bool(got.kept_from.min() < 3)
    return seen


@pytest.mark.parametrize("narrowing", [(), (2,)])
@pytest.mark.parametrize("start", get_args(Start))
@pytest.mark.parametrize(
    "switches",
    [
        replace(PRESETS["lmcache"], check_layer=2),
        replace(PRESETS["lmcache"], write_back="last-writer", mask="exact"),
        replace(PRESETS["cacheblend"], gap="zero"),
        replace(PRESETS["ideal"], write_back="last-writer"),
    ],
    ids=["lmcache", "last-writer-zeroed", "cacheblend-zeroed", "last-writer"],
)
def test_every_signal_over_a_small_history(switches: Switches, start: Start, narrowing: tuple[int, ...]) -> None:
    pair, policy = Pair(switches, 0.3), Drawn(frozenset(COMPARED), start, narrowing)
    for number, words in enumerate(TWICE):
        got, _ = pair.prefill(f"r{number}", prompt_of(words), policy)
    assert len(got.selected) < got.choice.recomputed or not narrowing or switches.check_layer == 2


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_every_signal_start_and_schedule_over_random_histories(family: str) -> None:
    seen = Counter[str]()
    for number, write_back in enumerate([*get_args(WriteBack), "last-writer"]):
        seen += compare(random.Random(f"{family} {number} {write_back}"), family, write_back)
    for what in (*COMPARED, *get_args(Start), "narrowed", "rewritten"):
        assert seen[what] > 0, f"no case of {what}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_every_signal_over_hundreds_of_random_histories(family: str) -> None:
    for number in range(200):
        drawn = random.Random(f"slow {family} {number}")
        compare(drawn, family, drawn.choice(get_args(WriteBack)))


@pytest.mark.parametrize("suffix", get_args(Suffix))
@pytest.mark.parametrize("start", get_args(Start))
@pytest.mark.parametrize("words", ["d2", "d2 d2", "q0 d2"])
def test_hardly_anything_to_reuse(words: str, start: Start, suffix: Suffix) -> None:
    """Of a prompt of one token the blended range may be empty; a last segment may itself be reused."""
    pair = Pair(Switches("exact", "zero", "any", "last-writer", suffix, check_layer=1), 1.0)
    for number in range(3):
        pair.prefill(f"r{number}", prompt_of(words), Drawn(frozenset(COMPARED), start))


class TestEqualToFullPrefill:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        switches=every_switch,
        history=histories,
        family=st.sampled_from(list(FAMILY_SETTINGS)),
        gap=st.sampled_from(["recompute", "zero"]),
    )
    def test_all_from_the_first_layer_with_an_exact_mask(
        self, switches: Switches, history: list[tuple[str, Part]], family: str, gap: Gap
    ) -> None:
        """Zeroed gaps are reusable, so that they are recomputed as well, at every layer. Entries that are used in none
        but their own context (`versioned`) are not, and need gaps that were not zeroed."""
        gap = "recompute" if switches.write_back == "versioned" else gap
        engine = engine_of(replace(switches, mask="exact", gap=gap), 1.0, family)
        for number, (words, _) in enumerate(history):
            prompt = prompt_of(words)
            expected = engine.prefill("full", "request", prompt, None)
            logits, keys, values = (each.clone() for each in (expected.logits, expected.keys, expected.values))
            got = engine.prefill(f"r{number}", "request", prompt, Drawn(start="first-layer"))
            assert len(got.selected) == len(got.reusable)
            torch.testing.assert_close(got.logits, logits, **TOLERANCE)
            torch.testing.assert_close(got.keys, keys, **TOLERANCE)
            torch.testing.assert_close(got.values, values, **TOLERANCE)


@dataclass
class Asks(Policy):
    """Does `ask` with its context and selects as `Every` does."""

    ask: Callable[[SelectionContext], Any]
    needs: frozenset[Need] = frozenset()
    start: Start = "check-layer"
    name: str = "asks"
    heard: list[Any] = field(default_factory=list)

    def budget(self, request: BudgetContext) -> int:
        return Every().budget(request)

    def select(self, context: SelectionContext) -> Positions:
        self.heard.append(self.ask(context))
        return Every().select(context)


ASK: dict[Need, Callable[[SelectionContext], Any]] = {
    "deviation": lambda context: context.deviation,
    "key-deviation": lambda context: [context.key_deviation(layer) for layer in range(context.layer + 1)],
    "value-deviation": lambda context: [context.value_deviation(layer) for layer in range(context.layer + 1)],
    "query-attention": lambda context: [context.query_attention(layer) for layer in (2, 0, 1)],
    "auxiliary-attention": lambda context: context.auxiliary_attention(),
    "written-attention": lambda context: context.written_attention(),
    "output-kl": lambda context: [context.output_kl(context.positions[:count]) for count in (0, 3)],
}


def second_request(switches: Switches, policy: Policy) -> tuple[EmbeddedEngine, Any]:
    engine = engine_of(switches, 0.3)
    engine.prefill("r0", "request", prompt_of(TWICE[0]), policy)
    return engine, engine.prefill("r1", "request", prompt_of(TWICE[1]), policy)


@pytest.mark.parametrize("start", get_args(Start))
@pytest.mark.parametrize("suffix", get_args(Suffix))
@pytest.mark.parametrize("gap", ["zero", "recompute"])
@pytest.mark.parametrize("need", ASK)
def test_asking_changes_nothing_of_the_pass_the_cache_or_the_store(
    need: Need, gap: Gap, suffix: Suffix, start: Start
) -> None:
    switches = Switches("bottom-right", gap, "any", "last-writer", suffix, check_layer=1)
    policy = Asks(ASK[need], frozenset({need}), start)
    (asked, got), (silent, expected) = (second_request(switches, each) for each in (policy, Drawn(start=start)))
    assert len(policy.heard) == 1
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.keys, expected.keys)
    assert torch.equal(got.values, expected.values)
    assert np.array_equal(got.deviation, expected.deviation)
    for entry, twin in zip(asked.cache.entries(), silent.cache.entries(), strict=True):
        assert torch.equal(entry.states, twin.states)


def counted(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of everything that computes."""
    calls = Counter[str]()

    def count(owner: Any, name: str) -> None:
        wrapped = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return wrapped(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("below", "project", "raw_keys", "values", "queries", "attention", "extend"):
        count(engine.transformer, name)
    count(engine.blender, "auxiliary")
    return calls


BARE = {
    "check-layer": {"below": 1, "extend": 1, "project": 3 + 3},
    "first-layer": {"below": 1, "extend": 1, "project": 3 + 3},
}
"""Of a request with 3 layers, the check layer 1 and a suffix after the range: one layer below for the range and two
above, or three from the first, then three for the suffix."""


@pytest.mark.parametrize("start", get_args(Start))
class TestOnlyWhatIsDeclaredIsComputed:
    SWITCHES = Switches("exact", "recompute", "any", "none", "after", check_layer=1)

    def test_nothing_for_a_policy_that_declares_nothing(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self._calls(Drawn(start=start), monkeypatch) == BARE[start]

    @pytest.mark.parametrize("need", ASK)
    def test_nothing_for_one_that_declares_and_does_not_ask(
        self, start: Start, need: Need, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self._calls(Asks(id, frozenset({need}), start), monkeypatch) == BARE[start]

    @pytest.mark.parametrize(
        ("need", "more"),
        [
            ("deviation", {"raw_keys": 1}),
            ("key-deviation", {"raw_keys": 1}),
            ("value-deviation", {"values": 1}),
            ("query-attention", {"attention": 3, "project": 3}),
            ("auxiliary-attention", {"auxiliary": 1}),
            ("written-attention", {}),
        ],
    )
    def test_each_signal_once(
        self, start: Start, need: Need, more: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = Counter(BARE[start]) + Counter(more)
        assert self._calls(Asks(ASK[need], frozenset({need}), start), monkeypatch) == expected

    def test_a_full_prefill_and_a_pass_each_for_the_output(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self._calls(Asks(ASK["output-kl"], frozenset({"output-kl"}), start), monkeypatch)
        passes = 2 * 3 if start == "first-layer" else 1 + 2 * 2
        assert calls == Counter(BARE[start]) + Counter(extend=1, project=3 + passes)

    def _calls(self, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
        """What a prefill calls before its first token is timed."""
        filling = replace(self.SWITCHES, write_back="first-writer")
        engine, reading = engine_of(filling, 0.3), engine_of(self.SWITCHES, 0.3)
        engine.prefill("r0", "request", prompt_of(TWICE[0]), policy_named("none"))
        reading.blender.cache = engine.cache
        calls = counted(reading, monkeypatch)
        got = reading.prefill("r1", "request", prompt_of(TWICE[1]), policy)
        before = Counter(calls)
        assert len(got.deviation) == len(got.reusable) > 0
        return before


@pytest.mark.parametrize("check_layer", [0, 1, 2])
@pytest.mark.parametrize("kind", get_args(Deviation))
@pytest.mark.parametrize("preset", ["lmcache", "ideal", "cacheblend"])
def test_a_deviation_that_no_policy_asked_for_is_the_one_that_it_would_have_seen(
    preset: str, kind: Deviation, check_layer: int
) -> None:
    switches = replace(PRESETS[preset], deviation=kind, check_layer=check_layer)
    asks, found = frozenset[Need]({"deviation"}), []
    for policy in (Asks(ASK["deviation"], asks), Drawn(), Drawn(start="first-layer"), Drawn(narrowing=(2,))):
        engine = engine_of(switches, 0.3)
        engine.prefill("r0", "request", prompt_of(TWICE[0]), policy_named("none"))
        served = engine.serve("r1", "request", prompt_of(TWICE[1]), Sampling(1), policy)
        assert served.selection is not None
        engine.reset()
        engine.prefill("r0", "request", prompt_of(TWICE[0]), policy_named("none"))
        found.append((served.selection.total_deviation, engine.prefill("r1", "request", prompt_of(TWICE[1]), policy)))
    (total, first), *others = found
    assert total > 0 or check_layer == 0, "nothing stands before layer 0"
    for other_total, other in others:
        assert other_total == total
        assert np.array_equal(other.deviation, first.deviation)


def test_what_is_recorded_of_a_selection_that_narrows_or_starts_at_the_first_layer() -> None:
    for policy, layer in ((Drawn(narrowing=(2,)), 1), (Drawn(start="first-layer"), 0)):
        engine = engine_of(PRESETS["ideal"], 0.3)
        engine.serve("r0", "request", prompt_of(TWICE[0]), Sampling(1), policy)
        served = engine.serve("r1", "request", prompt_of(TWICE[1]), Sampling(1), policy)
        assert served.selection is not None
        assert served.selection.layer == layer
        assert served.recomputed_tokens == served.budget_k == 6
        survivors = sum(end - start for start, end in served.selection.spans)
        assert survivors == (4 if policy.narrowing else 6)


def test_a_prelude_tells_no_selection_and_measures_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Switches(write_back="last-writer"), 0.3)
    engine.serve("r0", "request", prompt_of(TWICE[0]), Sampling(1), Drawn())
    calls = counted(engine, monkeypatch)
    served = engine.serve("r1", "prelude", prompt_of(TWICE[1]), Sampling(0), Drawn())
    assert served.recomputed_tokens == served.budget_k > 0
    assert served.selection is None
    assert calls["raw_keys"] == 0


class TestOutputKL:
    @pytest.mark.parametrize("start", get_args(Start))
    @pytest.mark.parametrize("preset", ["lmcache", "ideal", "epic"])
    def test_is_that_of_the_run_that_follows(self, preset: str, start: Start) -> None:
        policy = Asks(lambda context: context.output_kl(Every().select(context)), frozenset[Need]({"output-kl"}), start)
        engine, got = second_request(PRESETS[preset], policy)
        full = engine.prefill("full", "request", prompt_of(TWICE[1]), None)
        expected, observed = (each.logits.double().log_softmax(-1) for each in (full, got))
        divergence = float((expected.exp() * (expected - observed)).sum())
        assert policy.heard[-1] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
        assert divergence > 1e-3

    def test_of_everything_is_nothing_where_all_equals_full_prefill(self) -> None:
        policy = Asks(lambda context: context.output_kl(context.positions), frozenset[Need]({"output-kl"}))
        second_request(PRESETS["ideal"], policy)
        assert policy.heard == [pytest.approx(0, abs=1e-6)]

    def test_position_that_is_not_reusable_is_an_error_that_names_the_policy(self) -> None:
        policy = Asks(lambda context: context.output_kl(np.array([999])), frozenset[Need]({"output-kl"}))
        with pytest.raises(PolicyError, match="policy 'asks' asked for the output's KL at a position that is not"):
            second_request(PRESETS["ideal"], policy)


class TestWrittenAttention:
    def test_a_chunks_sums_add_up_to_its_tokens(self) -> None:
        engine, _ = second_request(PRESETS["lmcache"], Drawn(frozenset[Need]({"written-attention"})))
        entries = engine.cache.entries()
        assert len(entries) == 6
        for entry in entries:
            assert entry.attention is not None
            chunk, tokens = entry.attention.chunk, len(entry.token_ids)
            assert chunk.inside + sum(chunk.over.values()) == pytest.approx(tokens, rel=1e-5)
            assert entry.attention.outside.sum() == pytest.approx(sum(chunk.over.values()), rel=1e-5)

    def test_is_saved_for_no_policy_that_does_not_declare_it(self) -> None:
        engine, _ = second_request(PRESETS["lmcache"], Drawn())
        assert [entry.attention for entry in engine.cache.entries()] == [None] * 6

    def test_a_chunk_that_is_rewritten_without_being_computed_keeps_what_was_saved(self) -> None:
        """From the first layer on, reused rows have no queries."""
        policy = Drawn(frozenset[Need]({"written-attention"}), "first-layer")
        engine = engine_of(replace(PRESETS["ideal"], write_back="last-writer"), 0.3)
        engine.prefill("r0", "request", prompt_of(TWICE[0]), policy)
        saved = {entry.token_ids: entry.attention for entry in engine.cache.entries()}
        engine.prefill("r1", "request", prompt_of(TWICE[1]), policy)
        again = {entry.token_ids: entry for entry in engine.cache.entries()}
        documents = [ids for ids in saved if ids in again and len(ids) in (4, 6, 7)]
        assert len(documents) == 3
        for ids in documents:
            assert again[ids].writer_request_id == "r1"
            assert again[ids].attention is saved[ids] is not None


class TestAuxiliaryAttention:
    def test_is_asked_with_the_last_segment_and_cut_to_the_reusable_tokens(self) -> None:
        policy = Asks(
            lambda context: (context.positions, context.auxiliary_attention()),
            frozenset[Need]({"auxiliary-attention"}),
        )
        second_request(PRESETS["ideal"], policy)
        ((positions, attention),) = policy.heard
        prompt = prompt_of(TWICE[1])
        assert np.array_equal(attention, looked_at(prompt, *_last_segment(prompt))[:, positions])

    def test_without_a_model_the_engine_says_so(self) -> None:
        engine = engine_of(PRESETS["ideal"], 0.3)
        engine.blender.auxiliary = None
        policy = Asks(ASK["auxiliary-attention"], frozenset[Need]({"auxiliary-attention"}))
        engine.prefill("r0", "request", prompt_of(TWICE[0]), policy)
        with pytest.raises(EngineError, match=r"policy 'asks' asked for auxiliary attention, and no .* model is open"):
            engine.prefill("r1", "request", prompt_of(TWICE[1]), policy)

    def test_the_capabilities_tell(self) -> None:
        signals = engine_of(PRESETS["ideal"]).capabilities.signals
        assert signals == frozenset(get_args(Need)) - {"auxiliary-attention"}


def _last_segment(prompt: Prompt) -> tuple[int, int]:
    return prompt.segments[-1].start, prompt.segments[-1].end


@pytest.mark.parametrize("policy", [Drawn(frozenset({"deviation"})), Drawn(), Drawn(start="first-layer")])
def test_a_deviation_that_is_not_finite_is_an_error_and_nothing_is_written(policy: Policy) -> None:
    engine = engine_of(PRESETS["ideal"], 0.3)
    engine.prefill("r0", "request", prompt_of(TWICE[0]), policy_named("none"))
    with torch.inference_mode():
        for entry in engine.cache.entries():
            entry.states[1] = torch.inf
    held = engine.cache.entries()
    with pytest.raises(EngineError, match="the token deviation of request 'r1' is not finite"):
        engine.serve("r1", "request", prompt_of(TWICE[1]), Sampling(1), policy)
    assert {entry.key for entry in engine.cache.entries()} == {entry.key for entry in held}
