"""A policy that is asked again under other roundings: what it sees, what it does not change, what is counted."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import FixedSignals, context_of

from kvaudit.errors import PolicyError
from kvaudit.plugins import available, load
from kvaudit.policies import ChunkAttention, Need, Policy, SelectionContext, WrittenAttention
from kvaudit.policies.rounding import DRAWS, SCORES, WIDTH, is_watched, watched
from kvaudit.policies.tokens import TokenTopK as TokenTopK

PRECISION = 1e-6
REACH = WIDTH * PRECISION
FAR, NEAR = 1.0, 1e-13


class Rounding(FixedSignals):
    """Vectors of length 2 that rounding moves by a millionth."""

    precision = PRECISION

    def norms(self, need: Need, layer: int) -> np.ndarray:
        return np.full(len(self.ranked), 2.0, dtype=np.float32)


def context(deviation, k, **fields) -> SelectionContext:
    made = context_of(f"d{len(deviation)} q1-", deviation, k, **fields)
    given = {name: getattr(made.signals, name) for name in FixedSignals.__dataclass_fields__}
    return replace(made, signals=Rounding(**given))


class Shown(Policy):
    """Takes the first k, and keeps what it was shown."""

    name = "shown"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {"deviation", "key-deviation", "value-deviation", "query-attention", "auxiliary-attention"}
    )

    seen: ClassVar[list] = []
    luck: ClassVar[list] = []

    def select(self, context):
        self.seen.append(
            (
                context.deviation,
                context.key_deviation(0),
                context.value_deviation(0),
                context.query_attention(0),
                context.auxiliary_attention(),
            )
        )
        self.luck.append(context.rng.random())
        assert context.deviation is self.seen[-1][0], "asked twice, a signal is the same"
        return context.positions[: context.k]


def test_what_only_rounding_tells_apart_is_decided_by_it():
    policy = watched(TokenTopK(), follow=False)
    chosen = policy.select(context([NEAR, 0, 2 * NEAR, 0, 0, 0, 0, 0], 1))
    assert chosen.tolist() == [2], "the choice is that of what was shown"
    assert policy.decided == 1


def test_tokens_that_really_deviate_are_not():
    policy = watched(TokenTopK(), follow=False)
    assert sorted(policy.select(context([NEAR, FAR, 0, FAR + 0.1, NEAR], 2))) == [1, 3]
    assert policy.decided == 0
    policy.select(context([NEAR, FAR, 0, FAR + 0.1, NEAR, 0, 0, 0], 4))
    assert policy.decided > 0, "but what is left of the budget is filled by rounding"


def test_a_rounding_can_be_followed():
    found = {tuple(watched(TokenTopK(), follow=True).select(context([NEAR] * 8, 1, seed=seed))) for seed in range(20)}
    assert len(found) > 3
    again = [watched(TokenTopK(), follow=True).select(context([NEAR] * 8, 3, seed=4)).tolist() for _ in range(2)]
    assert again[0] == again[1]


deviations = st.lists(st.floats(0, 1e3, width=32), min_size=3, max_size=9)


@settings(deadline=None)
@given(deviations, st.integers(0, 99))
def test_signals_move_within_their_rounding_and_luck_stays(deviation, seed):
    tokens = len(deviation)
    attention = np.linspace(0.1, 0.9, 2 * tokens, dtype=np.float32).reshape(2, tokens)
    plain = np.array(deviation, dtype=np.float32)
    fields = {"keys": {0: plain}, "values": {0: plain}, "queries": {0: attention}, "auxiliary": attention}
    policy = Shown()
    policy.seen.clear()
    policy.luck.clear()
    watched(policy, follow=False).select(context(deviation, 1, seed=seed, needs=Shown.needs, **fields))
    assert len(policy.seen) == 1 + DRAWS
    assert set(policy.luck) == {context(deviation, 1, seed=seed).rng.random()}
    shown, *others = policy.seen
    for other in others:
        for distance in other[:3]:
            moved = np.sqrt(distance.astype(float)) - np.sqrt(plain.astype(float))
            mirrored = np.sqrt(distance.astype(float)) + np.sqrt(plain.astype(float))
            allowed = 2 * REACH * 1.01 + 1e-6 * np.sqrt(plain)
            assert (np.minimum(abs(moved), mirrored) <= allowed).all(), "a root that rounding takes below 0 turns up"
            assert not distance.flags.writeable
        for weights in other[3:]:
            assert np.allclose(weights, attention, rtol=1.01 * REACH * SCORES + 1e-6)
            assert (weights != attention).any()
    assert np.array_equal(shown[0], plain)


def test_written_attention_and_the_outputs_kl_move_too():
    class Written(Policy):
        name = "written"
        needs: ClassVar[frozenset[Need]] = frozenset({"written-attention", "output-kl"})
        seen: ClassVar[list] = []

        def select(self, context):
            kl = context.output_kl(context.positions[:1]), context.output_kl(context.positions[:1])
            assert kl[0] == kl[1]
            self.seen.append((context.written_attention(), kl[0]))
            return context.positions[:1]

    saved = WrittenAttention(np.array([0.5, np.nan, 0.25], np.float32), (ChunkAttention(2.0, {"a": 1.0}), None))
    given = {"written": saved, "kl": {(0,): 0.5}, "needs": Written.needs}
    policy = watched(Written(), follow=True)
    assert policy.select(context([0, 0, 0], 1, **given)).tolist() == [0]
    (_, kl), (written, other_kl) = Written.seen
    assert kl == 0.5
    assert other_kl != 0.5
    assert other_kl == pytest.approx(0.5, abs=3 * REACH * SCORES)
    assert np.isnan(written.outside).tolist() == [False, True, False]
    assert written.chunks[1] is None
    assert written.chunks[0].over.keys() == {"a"}
    assert written.chunks[0].inside == pytest.approx(2.0, rel=REACH * SCORES * 1.01 + 1e-6)


def test_state_within_a_request_is_each_question_s_own():
    class Stages(Policy):
        name = "stages"

        def __init__(self):
            self.left = [1, 2]

        def select(self, context):
            self.left.pop()
            return context.positions[: context.k]

    policy = watched(Stages(), follow=False)
    policy.select(context([1, 2, 3], 1))
    policy.select(context([1, 2, 3], 1))
    with pytest.raises(IndexError):
        policy.select(context([1, 2, 3], 1))


def test_a_policy_that_cannot_be_copied_is_asked_itself():
    class Locked(TokenTopK):
        def __init__(self):
            object.__setattr__(self, "lock", threading.Lock())

    policy = watched(Locked(), follow=False)
    assert policy.select(context([NEAR, 0, 2 * NEAR, 0, 0, 0, 0, 0], 1)).tolist() == [2]
    assert policy.decided == 1


def test_what_fails_only_when_it_is_asked_again_says_so():
    class Brittle(Policy):
        name = "brittle"

        def select(self, context):
            return context.positions[[{0.0: 0, 1.0: 0}[float(context.deviation[0])]]]

    with pytest.raises(PolicyError, match="'brittle', asked again with its signals rounded otherwise: KeyError"):
        watched(Brittle(), follow=False).select(context([1, 2, 3], 1))


def test_two_names_of_one_signal_are_rounded_alike():
    class Both(Policy):
        name = "both"
        needs: ClassVar[frozenset[Need]] = frozenset({"deviation", "key-deviation"})

        def select(self, context):
            assert np.array_equal(context.deviation, context.key_deviation(0))
            return context.positions[: context.k]

    made = context([1, 2, 3], 1, needs=Both.needs)
    watched(Both(), follow=False).select(replace(made, signals=replace(made.signals, keys={0: made.signals.ranked})))


def test_the_twin_is_its_policy_in_all_else_and_tells_what_asking_again_took():
    own = TokenTopK()
    twin = watched(own, follow=False)
    assert (twin.name, twin.needs, twin.start, twin.engine) == (own.name, own.needs, own.start, own.engine)
    assert twin.untimed_seconds == 0
    twin.select(context([1, 2, 3], 1))
    assert twin.untimed_seconds > 0


def test_a_broken_selection_is_the_policys_error():
    class Twice(Policy):
        name = "twice"

        def select(self, context):
            return context.positions[[0, 0]]

    with pytest.raises(PolicyError, match="policy 'twice' returned a position twice"):
        watched(Twice(), follow=False).select(context([1, 2, 3], 2))


@pytest.mark.parametrize("name", available("policies"))
def test_policies_that_rank_by_signals_are_watched(name):
    policy = load("policies", name)()
    assert is_watched(policy, follow=True) == bool(policy.needs)
    assert is_watched(policy, follow=False) == (bool(policy.needs) and "output-kl" not in policy.needs)
