"""The engine held against the slow reference: logits, mixed cache, deviations, selections, store and ledger."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import get_args

import numpy as np
import pytest
import torch
from blend_cases import (
    CHUNK_LOOKUPS,
    POLICIES,
    TOKEN_BYTES,
    TOLERANCE,
    Pair,
    engine_of,
    every_switch,
    histories,
    model_of,
    policy_named,
    prompt_of,
    rolling_prompts,
    words_drawn,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_reference import SlowEngine, SlowResult
from slow_store import SlowEntry
from tiny_models import FAMILY_SETTINGS

from kvaudit.engines import PRESETS, Gap, Lookup, Mask, Suffix, Switches, WriteBack
from kvaudit.engines.embedded.engine import EmbeddedEngine, Prefilled
from kvaudit.records import FULL_PREFILL, CacheState, Part, Prompt, Sampling, Served, runs

History = list[tuple[str, Part]]
DRAWN_POLICIES = [*POLICIES, "every", FULL_PREFILL]


@pytest.mark.parametrize(
    ("mask", "gap", "lookup", "write_back"),
    list(product(get_args(Mask), get_args(Gap), CHUNK_LOOKUPS, get_args(WriteBack))),
)
def test_every_combination_over_a_random_history(mask: Mask, gap: Gap, lookup: Lookup, write_back: WriteBack) -> None:
    drawn = random.Random(f"{mask} {gap} {lookup} {write_back}")
    compare_over_drawn_history(drawn, drawn_switches(drawn, mask, gap, lookup, write_back))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_hundreds_of_random_histories(family: str) -> None:
    for seed in range(250):
        drawn = random.Random(f"{family} {seed}")
        values = (get_args(Mask), get_args(Gap), CHUNK_LOOKUPS, get_args(WriteBack))
        combination = (drawn.choice(each) for each in values)
        compare_over_drawn_history(drawn, drawn_switches(drawn, *combination), family)


def drawn_switches(drawn: random.Random, mask: Mask, gap: Gap, lookup: Lookup, write_back: WriteBack) -> Switches:
    return Switches(
        mask,
        gap,
        lookup,
        write_back,
        suffix=drawn.choice(["after", "with-rows"]),
        deviation=drawn.choice(["key", "value"]),
        check_layer=drawn.randrange(3),
        capacity_bytes=drawn.choice([None, None, 12 * TOKEN_BYTES, 20 * TOKEN_BYTES]),
        keys=drawn.choice(["moved", "moved", "unmoved"]),
    )


def compare_over_drawn_history(drawn: random.Random, switches: Switches, family: str | None = None) -> None:
    pair = Pair(switches, drawn.choice([0.15, 0.4]), family or drawn.choice(list(FAMILY_SETTINGS)))
    for number, words in enumerate(words_drawn(drawn, 4)):
        pair.prefill(f"r{number}", prompt_of(words), policy_named(drawn.choice(DRAWN_POLICIES)))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    switches=every_switch,
    history=histories,
    policy=st.sampled_from(DRAWN_POLICIES),
    ratio=st.sampled_from([0.05, 0.3, 0.7, 1.0]),
    family=st.sampled_from(list(FAMILY_SETTINGS)),
)
def test_any_history(switches: Switches, history: History, policy: str, ratio: float, family: str) -> None:
    pair = Pair(switches, ratio, family)
    for number, (words, part) in enumerate(history):
        pair.prefill(f"r{number}", prompt_of(words), policy_named(policy), part)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(switches=every_switch, history=histories, policy=st.sampled_from(["none", "all", "every"]))
def test_what_served_says(switches: Switches, history: History, policy: str) -> None:
    pair = Pair(switches, 0.4)
    for number, (words, part) in enumerate(history):
        prompt, max_tokens = prompt_of(words), 0 if part == "prelude" else 1
        stored = set(pair.slow.store.entries.values())
        served, slow = pair.serve(f"r{number}", prompt, policy_named(policy), max_tokens, part)
        if max_tokens:
            _assert_provenance_is_told(served, slow, prompt, stored, pair.hashes)
            _assert_selection_is_told(served, slow)


def _assert_provenance_is_told(
    served: Served, slow: SlowResult, prompt: Prompt, stored: set[SlowEntry], hashes: Mapping[tuple[int, ...], str]
) -> None:
    reused = [(index, entry) for index, entry in enumerate(slow.usable) if entry in stored]
    for row, (index, entry) in zip(served.provenance, reused, strict=True):
        assert (row.segment, row.content_id, row.write_ordinal) == (index, entry.content_id, entry.write_ordinal)
        assert (row.writer_request_id, row.writer_part) == (entry.writer_request_id, entry.writer_part)
        assert (row.old_position, row.new_position) == (entry.position, prompt.segments[index].start)
        assert row.context_hash_written == hashes[entry.context]
        now = prompt.token_ids[: row.new_position]
        assert (row.context_hash_now == row.context_hash_written) == (now == entry.context)


def _assert_selection_is_told(served: Served, slow: SlowResult) -> None:
    reusable, selected = slow.selection.reusable, slow.selection.selected
    assert (served.reusable_tokens, served.recomputed_tokens) == (len(reusable), len(selected))
    assert served.budget_k == len(selected)
    if served.selection is None:
        assert not selected
        return
    deviation = dict(zip(reusable, slow.selection.deviation.tolist(), strict=True))
    assert served.selection.spans == tuple(runs(selected))
    expected = [sum(deviation[position] for position in range(*span)) for span in runs(selected)]
    np.testing.assert_allclose(served.selection.deviation, expected, **TOLERANCE)
    np.testing.assert_allclose(served.selection.total_deviation, sum(deviation.values()), **TOLERANCE)


class TestEqualToFullPrefill:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(switches=every_switch, history=histories, family=st.sampled_from(list(FAMILY_SETTINGS)))
    def test_all_with_an_exact_mask_and_gaps_recomputed(
        self, switches: Switches, history: History, family: str
    ) -> None:
        engine = engine_of(replace(switches, mask="exact", gap="recompute"), 0.1, family)
        for number, (words, _) in enumerate(history):
            assert_full_prefill(engine, f"r{number}", words, "all")

    @pytest.mark.parametrize("write_back", ["first-writer", "last-writer", "versioned", "versions"])
    @pytest.mark.parametrize("gap", ["recompute", "store"])
    @pytest.mark.parametrize("suffix", ["after", "with-rows"])
    @pytest.mark.parametrize("check_layer", [0, 1, 2])
    def test_chunks_reused_where_and_after_what_they_were_written(
        self, write_back: WriteBack, gap: Gap, suffix: Suffix, check_layer: int
    ) -> None:
        engine = engine_of(Switches("exact", gap, "any", write_back, suffix, check_layer=check_layer))
        again, longer = "i0 s0 d0 s1 d1 g0 q0", "i0 s0 d0 s1 d1 g0 d3 q1"
        in_place = 3 + 4 + 6 + (2 + 1 + 1 if gap == "store" else 0)
        for number, (words, policy, reused) in enumerate(
            [
                (again, "none", 0),
                (again, "none", in_place + 2),
                (longer, "token-topk", in_place),
                (longer, "none", in_place + 7 + 4),
            ]
        ):
            assert assert_full_prefill(engine, f"r{number}", words, policy).reused_tokens == reused


def assert_full_prefill(engine: EmbeddedEngine, request_id: str, words: str, policy: str) -> Prefilled:
    expected = engine.prefill(request_id, "request", prompt_of(words), None)
    logits, keys, values = (each.clone() for each in (expected.logits, expected.keys, expected.values))
    got = engine.prefill(request_id, "request", prompt_of(words), policy_named(policy))
    torch.testing.assert_close(got.logits, logits, **TOLERANCE)
    torch.testing.assert_close(got.keys, keys, **TOLERANCE)
    torch.testing.assert_close(got.values, values, **TOLERANCE)
    return got


@pytest.mark.parametrize("write_back", ["isolated", "versioned"])
@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    switches=every_switch,
    history=histories,
    words=rolling_prompts,
    policy=st.sampled_from(DRAWN_POLICIES),
    family=st.sampled_from(list(FAMILY_SETTINGS)),
)
def test_the_same_answer_whatever_was_served_before(
    write_back: WriteBack, switches: Switches, history: History, words: str, policy: str, family: str
) -> None:
    engine = engine_of(replace(switches, write_back=write_back), 0.3, family)
    answer, logits = answer_of(engine, words, policy)
    for number, (earlier, part) in enumerate(history):
        engine.prefill(f"h{number}", part, prompt_of(earlier), policy_named(policy))
    for _ in ("after that history", "after a reset"):
        again, logits_again = answer_of(engine, words, policy)
        assert again == answer
        if write_back == "isolated":
            assert torch.equal(logits_again, logits), "chunks computed alone are the same bits every time"
        engine.reset()


def answer_of(engine: EmbeddedEngine, words: str, policy: str) -> tuple[tuple[int, ...], torch.Tensor]:
    prompt, chosen = prompt_of(words), policy_named(policy)
    answer = engine.serve("r", "request", prompt, Sampling(8), chosen).answer_ids
    return answer, engine.prefill("r", "request", prompt, chosen).logits.clone()


@pytest.mark.parametrize("mask", get_args(Mask))
@pytest.mark.parametrize("suffix", get_args(Suffix))
@pytest.mark.parametrize("write_back", get_args(WriteBack))
@pytest.mark.parametrize("check_layer", [0, 1, 2])
def test_a_prompt_of_one_token_that_is_cached(
    mask: Mask, suffix: Suffix, write_back: WriteBack, check_layer: int
) -> None:
    """With the suffix after the rows the blended range is empty."""
    pair = Pair(Switches(mask, "zero", "any", write_back, suffix, check_layer=check_layer))
    for number in range(3):
        pair.prefill(f"r{number}", prompt_of("d2"), policy_named("token-topk"))


class TestFirstWriter:
    """Three requests that share documents, in all six orders: what the reference predicts, the engine does."""

    TRACE = ("i0 s0 d0 s0 d1 s0 q0", "i0 s0 d1 s0 d3 s0 q0", "i0 s0 d3 s0 d0 s0 q1")

    @pytest.mark.parametrize("preset", ["lmcache", "ideal"])
    @pytest.mark.parametrize("policy", ["none", "every", "document-aligned"])
    def test_answers_vary_with_the_order_as_the_reference_predicts(self, preset: str, policy: str) -> None:
        predicted = self._answers(SlowAnswers(PRESETS[preset]), policy)
        assert self._answers(EngineAnswers(PRESETS[preset]), policy) == predicted
        assert variation(predicted) > 0

    @pytest.mark.parametrize("write_back", ["isolated", "versioned"])
    def test_no_variation_where_history_cannot_be_seen(self, write_back: WriteBack) -> None:
        switches = replace(PRESETS["lmcache"], write_back=write_back)
        assert variation(self._answers(EngineAnswers(switches), "none")) == 0

    def _answers(self, served: SlowAnswers | EngineAnswers, policy: str) -> list[list[list[int]]]:
        """Per request, its answer in each order."""
        answers: list[list[list[int]]] = [[] for _ in self.TRACE]
        for order in permutations(range(len(self.TRACE))):
            served.reset()
            for ordinal in order:
                answers[ordinal].append(served.answer(f"r{ordinal}", prompt_of(self.TRACE[ordinal]), policy))
        return answers


class SlowAnswers:
    def __init__(self, switches: Switches) -> None:
        self.engine = SlowEngine(model_of("llama"), switches, 0.3)
        self.reset = self.engine.reset

    def answer(self, request_id: str, prompt: Prompt, policy: str) -> list[int]:
        return self.engine.greedy(prompt, self.engine.serve(request_id, prompt, policy_named(policy)), 4)


class EngineAnswers:
    def __init__(self, switches: Switches) -> None:
        self.engine = engine_of(switches, 0.3)
        self.reset = self.engine.reset

    def answer(self, request_id: str, prompt: Prompt, policy: str) -> list[int]:
        return list(self.engine.serve(request_id, "request", prompt, Sampling(4), policy_named(policy)).answer_ids)


def variation(answers: list[list[list[int]]]) -> float:
    """The share of order pairs with different answers, averaged over requests (DESIGN 3)."""
    shares = [[left != right for left, right in combinations(of_request, 2)] for of_request in answers]
    return sum(sum(share) / len(share) for share in shares) / len(shares)


def test_the_random_policy_is_seeded_by_run_and_request_and_by_nothing_before_it() -> None:
    switches = Switches("exact", "recompute", "any", "isolated", "with-rows")
    words, selected = "i0 d0 d1 d3 d4 q0", {}
    for history in (["d0"], ["d3 d1", "i0 d0 q1", "d0 q0"]):
        engine = engine_of(switches, 0.2)
        for number, earlier in enumerate(history):
            engine.prefill(f"h{number}", "request", prompt_of(earlier), policy_named("random-document"))
        for request_id in ("r1", "r2", "r3", "r4", "r5"):
            got = engine.prefill(request_id, "request", prompt_of(words), policy_named("random-document"))
            assert selected.setdefault(request_id, got.selected.tolist()) == got.selected.tolist()
    assert len({tuple(each) for each in selected.values()}) > 1


def test_full_prefill_neither_reads_nor_writes_the_store() -> None:
    engine, prompt = engine_of(Switches()), prompt_of("i0 s0 d0 s0 q0")
    engine.prefill("r0", "request", prompt, None)
    assert engine.cache.entries() == []
    engine.prefill("r1", "request", prompt, policy_named("none"))
    written = engine.cache.entries()
    assert engine.prefill("r2", "request", prompt, None).reused_tokens == 0
    assert engine.cache.entries() == written


def test_reset_forgets_all_and_counts_anew() -> None:
    pair = Pair(Switches())
    pair.prefill("r0", prompt_of("i0 s0 d0 s0 q0"), policy_named("none"))
    assert pair.engine.reset() == CacheState(entries=0, size_bytes=0)
    pair.slow.reset()
    pair.prefill("r1", prompt_of("i0 s0 d0 s0 q0"), policy_named("none"))
