"""What the checks measure with: differences against noise, turns of keys, selection under control."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from tiny_engines import tiny_engine

from kvaudit.doctor.checks.findings import Inconclusive
from kvaudit.doctor.checks.given import Given
from kvaudit.doctor.checks.lab import Lab
from kvaudit.doctor.checks.measuring import PLAIN, QUIET, ROUNDING, Scale, distance
from kvaudit.doctor.checks.noise import logprobs_apart
from kvaudit.doctor.checks.position import _turn
from kvaudit.engines import PRESETS
from kvaudit.plugins import BUILT_IN
from kvaudit.policies import BudgetContext
from kvaudit.records import Reference

DIMENSIONS, SHIFT, CORE = 16, 11, 6


def test_a_difference_is_there_or_is_not_or_nobody_knows():
    scale = Scale(1e-5)
    assert not scale.differs("it", QUIET * 1e-5)
    assert scale.differs("it", PLAIN * 1e-5)
    with pytest.raises(Inconclusive, match="too near to the engine's own noise") as end:
        scale.differs("it", 1e-4)
    assert end.value.evidence == {"difference": 1e-4, "noise": 1e-5}


@pytest.mark.parametrize("nothing", [float("nan")])
def test_what_is_no_number_says_nothing(nothing):
    with pytest.raises(Inconclusive):
        Scale(1e-5).differs("it", nothing)


def test_the_layer_that_differs_most_counts():
    left = np.ones((3, 4, 2, 8), dtype=np.float32)
    right = left.copy()
    right[1] *= 1.5
    assert distance(left, right) == pytest.approx(0.5)
    assert distance(left, left) == 0
    assert distance(0 * left, left) == float("inf")
    assert distance(0 * left, 0 * left) == 0


def test_the_selection_is_what_was_given_of_what_is_reusable():
    policy = Given((7, 3, 99))
    reusable = np.array([1, 3, 7, 8])
    assert policy.budget(BudgetContext(4, 0.01, (), reusable)) == 2
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert "given" not in BUILT_IN["policies"]


def rotated(raw, first, neighbours):
    """Keys [1, P, 1, D] turned for positions from `first` on, in pairs (2 i, 2 i + 1) or (i, i + D/2)."""
    frequencies = 100.0 ** -(np.arange(DIMENSIONS // 2) / (DIMENSIONS // 2))
    angles = np.exp(1j * np.outer(first + np.arange(raw.shape[1]), frequencies))[None, :, None]
    if neighbours:
        turned = (raw[..., ::2] + 1j * raw[..., 1::2]) * angles
        return np.stack([turned.real, turned.imag], -1).reshape(raw.shape).astype(np.float32)
    left, right = np.split(raw, 2, -1)
    turned = (left + 1j * right) * angles
    return np.concatenate([turned.real, turned.imag], -1).astype(np.float32)


@pytest.mark.parametrize("neighbours", [False, True])
def test_a_turn_is_learnt_from_equal_tokens(neighbours):
    random = np.random.default_rng(1)
    raw = random.standard_normal((1, SHIFT + CORE, 1, DIMENSIONS))
    raw[:, SHIFT:] = raw[:, :CORE]
    turned, misfit = _turn(rotated(raw, 20, neighbours), SHIFT, CORE)
    assert misfit < 1e-5
    others = random.standard_normal((1, 9, 1, DIMENSIONS))
    moved = rotated(others, 50 + SHIFT, neighbours)
    assert distance(moved, turned(rotated(others, 50, neighbours))) < 1e-5


def test_keys_that_are_no_rotation_apart_tell_no_turn():
    keys = np.random.default_rng(1).standard_normal((1, SHIFT + CORE, 1, DIMENSIONS)).astype(np.float32)
    with pytest.raises(Inconclusive, match="no rotation apart"):
        _turn(keys, SHIFT, CORE)


def test_log_probabilities_are_compared_up_to_where_answers_part():
    ids = ((1, 2), (3, 4), (5, 6))
    left = Reference((1, 3, 5), ids, ((-0.5, -1.0), (-0.2, -2.0), (-0.1, -3.0)))
    right = Reference((1, 4, 5), ((2, 1), (4, 3), (5, 6)), ((-1.0, -0.5), (-2.0, -0.25), (-9.0, -9.0)))
    assert logprobs_apart(left, right) == pytest.approx(0.05)
    assert logprobs_apart(Reference((1,)), Reference((1,))) is None


def test_prompts_are_the_same_for_the_same_seed_and_no_chunk_begins_as_another():
    engine = tiny_engine(PRESETS["ideal"])

    def drawn(seed, check="gap"):
        lab = Lab(engine, check, ROUNDING, seed)
        chunks = [lab.chunk() for _ in range(20)]
        return chunks, lab.prompt(*chunks[:3])

    chunks, prompt = drawn(0)
    assert drawn(0) == (chunks, prompt)
    assert drawn(1)[0] != chunks
    assert drawn(0, "lookup")[0] != chunks
    assert len({chunk[0] for chunk in chunks}) == len(chunks)


def test_positions_are_those_of_the_prompt():
    lab = Lab(tiny_engine(PRESETS["ideal"]), "gap", ROUNDING)
    chunks = (lab.chunk(), lab.chunk(5), lab.chunk())
    prompt = lab.prompt(*chunks)
    for index, chunk in enumerate(chunks):
        at, gap = lab.at(chunks, index), lab.gap_after(chunks, index)
        assert tuple(prompt.token_ids[position] for position in at) == chunk
        assert (prompt.segments[2 * index].start, prompt.segments[2 * index].end) == (at.start, at.stop)
        assert (prompt.segments[2 * index + 1].start, prompt.segments[2 * index + 1].end) == (gap.start, gap.stop)
        assert not set(chunk) & {prompt.token_ids[position] for position in gap}
