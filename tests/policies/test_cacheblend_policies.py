"""CacheBlend's own repository (deviation of values) and its paper (the gradual filter)."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import context_of, contexts, for_policy

from kvaudit.policies import SelectionContext, checked_schedule, checked_selection
from kvaudit.policies.cacheblend import CacheBlend
from kvaudit.policies.cacheblend_gradual import CacheBlendGradual
from kvaudit.policies.tokens import TokenTopK


def test_values_rank_tokens_not_keys_nor_the_engines_own_deviation() -> None:
    values = {1: np.array([1, 5, 2, 5, 9], dtype=np.float32), 0: np.full(5, 7, dtype=np.float32)}
    context = context_of("d3 d2", [9, 8, 7, 6, 0], 3, needs=CacheBlend.needs, values=values)
    assert checked_selection(CacheBlend(), context).tolist() == [1, 3, 4], "9, 5 and the first 5, at the check layer"


@settings(max_examples=100, deadline=None)
@given(context=contexts())
def test_as_token_topk_over_the_deviation_of_values(context: SelectionContext) -> None:
    context = for_policy(CacheBlend(), context)
    ranked = sorted(zip(-np.roll(context.signals.deviation(), context.layer + 1), context.positions, strict=True))
    assert checked_selection(CacheBlend(), context).tolist() == sorted(int(p) for _, p in ranked[: context.k])


class TestGradual:
    @pytest.mark.parametrize(
        ("parameters", "k", "reusable", "layers", "counts"),
        [
            # 150 to 50 in four equal steps, 100 on average.
            ({}, 100, 1000, 5, (150, 125, 100, 75, 50)),
            # 200, then a third of it after two steps: 200 + 133 1/3 + 3 * 66 2/3 = 5 * 100 + 33 1/3 is too much, so
            # the level l after two steps solves 200 + (200 + l) / 2 + 3 l = 500: l = 57 1/7, and 128 4/7 before it.
            ({"first": 2, "layers": 2}, 100, 1000, 5, (200, 129, 57, 57, 57)),
            # One step: 200 and then (500 - 200) / 4.
            ({"first": 2, "layers": 1}, 100, 1000, 5, (200, 75, 75, 75, 75)),
            # More layers than there are: down to the last.
            ({"layers": 99}, 100, 1000, 5, (150, 125, 100, 75, 50)),
            # Only 110 are reusable: 110, 105, 100, 95, 90.
            ({}, 100, 110, 5, (110, 105, 100, 95, 90)),
            # 4 times 100 would leave the last layer with less than one token: 199 to 1.
            ({"first": 4}, 100, 1000, 3, (199, 100, 1)),
            # 3, 2 1/3, 1 2/3, 1: the larger remainder is rounded up.
            ({}, 2, 50, 4, (3, 2, 2, 1)),
        ],
    )
    def test_falls_in_equal_steps_about_the_budget(
        self, parameters: dict[str, float], k: int, reusable: int, layers: int, counts: tuple[int, ...]
    ) -> None:
        assert checked_schedule(CacheBlendGradual(**parameters), k, reusable, layers) == counts

    @pytest.mark.parametrize(
        ("parameters", "k", "reusable", "layers"),
        [
            ({}, 1, 50, 30),
            ({}, 0, 50, 30),
            ({}, 20, 50, 1),
            ({}, 20, 20, 30),
            ({"first": 1.0}, 20, 50, 30),
            ({}, 0, 0, 4),
        ],
    )
    def test_k_at_every_layer_where_nothing_can_fall(
        self, parameters: dict[str, float], k: int, reusable: int, layers: int
    ) -> None:
        assert CacheBlendGradual(**parameters).schedule(k, reusable, layers) is None

    @settings(max_examples=200, deadline=None)
    @given(
        first=st.floats(1, 1e6) | st.just(float("inf")),
        over=st.none() | st.integers(1, 40),
        reusable=st.integers(1, 500),
        share=st.floats(0, 1),
        layers=st.integers(1, 40),
    )
    def test_same_budget_never_rising_and_close_to_a_straight_fall(
        self, first: float, over: int | None, reusable: int, share: float, layers: int
    ) -> None:
        k = int(share * reusable)
        counts = checked_schedule(CacheBlendGradual(first, over), k, reusable, layers)
        if counts is None:
            assert min(k, layers - 1) <= 1 or k == reusable or first * k - k < 1
            return
        assert counts[-1] >= 1
        last = min(over or layers, layers - 1)
        steps = [Fraction(counts[0] - counts[last], last)] * last + [Fraction(0)] * (layers - 1 - last)
        for i, step in enumerate(steps):
            assert abs(counts[i] - counts[i + 1] - step) <= 2

    def test_survivors_are_ranked_again_by_their_deviation_there(self) -> None:
        policy = CacheBlendGradual()
        assert checked_schedule(policy, 2, 6, 2) == (3, 1)
        first = context_of("d6", [5, 4, 6, 1, 2, 3], 3)
        survivors = checked_selection(policy, first)
        assert survivors.tolist() == [0, 1, 2]
        again = replace(context_of("d6", [0, 9, 8], 1, holes=[3, 4, 5]), layer=2, layers=3)
        assert again.positions.tolist() == survivors.tolist()
        assert checked_selection(policy, again).tolist() == [1]

    @settings(max_examples=50, deadline=None)
    @given(context=contexts())
    def test_at_each_layer_the_rule_is_that_of_token_topk(self, context: SelectionContext) -> None:
        found = checked_selection(CacheBlendGradual(), context).tolist()
        assert found == checked_selection(TokenTopK(), context).tolist()
