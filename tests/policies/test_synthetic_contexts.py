"""Synthetic selection contexts: what a policy's own test is written with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.errors import PolicyError
from kvaudit.policies.check_cases import LONG, random_cases, reusable
from kvaudit.policies.legolink import LegoLink
from kvaudit.policies.synthetic import CHECK_LAYER, HEADS, LAYERS, SyntheticSignals, make_context, make_prompt

LAYOUT = "i2 s1 d3 s1- d2- g1 t2 q2-"


def test_a_layout_is_tiled_as_it_is_written():
    prompt = make_prompt(LAYOUT)
    assert [(s.kind, s.start, s.end, s.hit) for s in prompt.segments] == [
        ("instruction", 0, 2, True),
        ("separator", 2, 3, False),
        ("document", 3, 6, True),
        ("separator", 6, 7, False),
        ("document", 7, 9, False),
        ("glue", 9, 10, False),
        ("tool-result", 10, 12, True),
        ("query", 12, 14, False),
    ]
    assert prompt.positions.tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert prompt.tokens == 14
    assert [s.written is not None for s in prompt.segments] == [s.hit for s in prompt.segments]


@pytest.mark.parametrize("word", ["x3", "d", "d0", "3d", "d3+", "d-3", "D3"])
def test_what_is_no_segment_is_named(word):
    with pytest.raises(
        ValueError,
        match=rf"'{word.replace('+', chr(92) + '+')}' in 'd2 {word.replace('+', chr(92) + '+')}' is no segment",
    ):
        make_prompt(f"d2 {word}")


def test_signals_have_the_documented_shapes():
    context = make_context(LAYOUT, 3)
    assert (context.layer, context.layers) == (CHECK_LAYER, LAYERS)
    per_token = [context.deviation, context.key_deviation(0), context.value_deviation(1)]
    assert {array.shape for array in per_token} == {(9,)}
    assert {context.query_attention(layer).shape for layer in range(LAYERS)} == {(HEADS, 9)}
    assert context.auxiliary_attention().shape == (HEADS, 9)
    assert all(context.query_attention(3).sum(axis=1) <= 1)
    written = context.written_attention()
    assert np.isnan(written.outside).tolist() == [False, False, True, False, False, False, True, False, False]
    assert [chunk is not None for chunk in written.chunks] == [s.hit for s in context.segments]
    arrays = [*per_token, context.query_attention(), context.auxiliary_attention(), written.outside]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


def test_what_a_chunk_looked_at_sums_to_its_tokens():
    context = make_context("i4 d3 d5 d2 t3", 0)
    written = context.written_attention()
    for segment, chunk in zip(context.segments, written.chunks, strict=True):
        assert chunk.inside + sum(chunk.over.values()) == pytest.approx(segment.end - segment.start)
        assert written.outside[segment.start : segment.end].sum() == pytest.approx(sum(chunk.over.values()), rel=1e-5)
        assert set(chunk.over) == set(segment.written.over)


def test_the_damage_is_what_was_not_recomputed():
    context = make_context(LAYOUT, 3)
    everything = context.output_kl(context.positions[:0])
    assert context.output_kl(context.positions) == 0
    parts = [everything - context.output_kl(context.positions[[index]]) for index in range(9)]
    assert sum(parts) == pytest.approx(everything)
    assert min(parts) > 0
    with pytest.raises(PolicyError, match="not reusable"):
        context.output_kl(np.array([6]))


def test_given_values_take_the_place_of_random_ones():
    context = make_context("d3 d2-", 1, deviation=[1, np.nan, 3], attention=[0.1, 0.2, 0.3])
    for array in (context.deviation, context.key_deviation(0), context.value_deviation()):
        assert np.array_equal(array, np.array([1, np.nan, 3], dtype=np.float32), equal_nan=True)
    assert context.query_attention(2).tolist() == context.auxiliary_attention().tolist()
    assert context.query_attention(2)[0].tolist() == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("k", "given", "message"),
    [
        (-1, {}, "has 3 reusable tokens: k cannot be -1"),
        (4, {}, "has 3 reusable tokens: k cannot be 4"),
        (1, {"deviation": [1, 2]}, r"there are 3 reusable tokens, and values of shape \(2,\)"),
        (1, {"attention": [[1, 2, 3]]}, r"there are 3 reusable tokens, and values of shape \(1, 3\)"),
    ],
)
def test_what_cannot_be_is_refused(k, given, message):
    with pytest.raises(ValueError, match=message):
        make_context("d3 d2-", k, **given)


def test_a_policy_that_starts_at_the_first_layer_sees_no_deviation():
    context = make_context("d3", 1, policy=LegoLink)
    assert (context.layer, context.policy) == (0, "legolink")
    for signal in ("key_deviation", "value_deviation"):
        with pytest.raises(PolicyError, match="sees no deviation"):
            getattr(context, signal)()
    with pytest.raises(PolicyError, match="sees no deviation"):
        _ = context.deviation
    assert context.query_attention().shape == (HEADS, 3)


def test_only_what_is_needed_is_shown():
    context = make_context("d3", 1, needs=frozenset({"deviation"}))
    assert context.deviation.shape == (3,)
    with pytest.raises(PolicyError, match="asked for query-attention, and declares deviation"):
        context.query_attention()


@given(st.integers(0, 3))
def test_the_same_seed_is_the_same_request(seed):
    first, again, other = (make_context(LAYOUT, 2, seed=number) for number in (seed, seed, seed + 1))
    assert first.deviation.tolist() == again.deviation.tolist() != other.deviation.tolist()
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()
    assert first.rng.random() == again.rng.random() != other.rng.random()
    assert first.segments == again.segments


def test_narrowed_signals_are_those_of_the_tokens_that_are_left():
    whole = make_context(LAYOUT, 2).signals
    kept = np.arange(9) % 2 == 0
    here = whole.at(3, kept)
    assert here.deviation().tolist() == whole.keys[3][kept].tolist()
    assert here.auxiliary_attention().tolist() == whole.auxiliary[:, kept].tolist()
    assert here.output_kl(here.positions) == 0
    assert replace(here, damage=here.damage * 0).output_kl(here.positions[:0]) == 0
    assert isinstance(here, SyntheticSignals)


def test_cases_go_from_small_to_large_and_cover_missed_segments_gaps_and_every_k():
    cases = random_cases()
    sizes = [reusable(case.layout) for case in cases]
    assert sizes == sorted(sizes)
    for size in sizes:
        ks = {case.k for case in cases if reusable(case.layout) == size}
        assert ks == (set(range(size + 1)) if size <= 6 else {0, 1, 2, size // 2, size - 1, size})
    assert any("-" in case.layout for case in cases)
    assert any("s" in case.layout for case in cases)
    assert sizes[0] <= 2
    assert 7400 < reusable(LONG) < 7600
