"""What every registered policy must do, whatever it prefers; one table, all policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import context_of, contexts

from kvaudit.errors import PolicyError
from kvaudit.plugins import BUILT_IN, load
from kvaudit.policies import (
    BudgetContext,
    Policy,
    SegmentView,
    SelectionContext,
    checked_budget,
    checked_selection,
    ratio_budget,
)

NAMES = list(BUILT_IN["policies"])
UNBOUND = [name for name in NAMES if name not in ("none", "all")]

SHAPES = {
    "one document": ("d8", [1, 2, 3, 4, 5, 6, 7, 8]),
    "one token": ("d1", [1]),
    "no deviation": ("i2 d3 d3", [0] * 8),
    "all equal": ("i2 d3 d3", [0.1] * 8),
    "not a number": ("i2 d3 d3", [np.nan] * 8),
    "some not a number": ("i2 d3 d3", [1, np.nan, 2, 3, np.nan, np.nan, 0, 0]),
    "infinite": ("i2 d3 d3", [1, np.inf, 2, 3, np.inf, np.inf, 0, 0]),
    "infinite and not a number": ("i2 d3 d3", [np.nan, np.inf, np.nan, 3, np.inf, np.nan, 0, 0]),
    "huge beside tiny": ("i2 d3 d3", [1e-38, 3e38, 1e-38, 3e38, 1e-45, 0, 3e38, 1e-20]),
    "missed documents": ("i2- d3 d3- d5", [1, 2, 3, 4, 5, 6, 7, 8]),
    "zeroed separators": ("i2 s1 d2 s1 d1 s1", [1, 2, 9, 3, 4, 9, 5, 9]),
    "separators only": ("s3 g2 d4- s3", [1, 2, 3, 4, 5, 6, 7, 8]),
    "messages": ("g1 m3 g1 m2 t1", [1, 2, 3, 4, 5, 6, 7, 8]),
}


def policy_named(name: str) -> Policy:
    return load("policies", name)()


def budget_of(policy: Policy, reusable: int, ratio: float) -> int:
    whole = SegmentView("document", "d", 0, reusable, True)
    return checked_budget(policy, BudgetContext(reusable, ratio, [whole], np.arange(reusable)))


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_registered_one(name: str) -> None:
    assert policy_named(name).name == name


@pytest.mark.parametrize("name", UNBOUND)
@pytest.mark.parametrize(
    ("reusable", "ratio", "k"), [(0, 0.5, 0), (1, 0.05, 1), (19, 0.05, 1), (20, 0.05, 1), (7540, 0.05, 377), (8, 1, 8)]
)
def test_budget_is_the_ratio_rounded_down_and_at_least_one(name: str, reusable: int, ratio: float, k: int) -> None:
    assert budget_of(policy_named(name), reusable, ratio) == ratio_budget(reusable, ratio) == k


@pytest.mark.parametrize("name", UNBOUND)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("error")
def test_exactly_k_at_extreme_shapes(name: str, shape: str) -> None:
    layout, deviation = SHAPES[shape]
    for k in range(len(deviation) + 1):
        context = context_of(layout, deviation, k)
        assert len(checked_selection(policy_named(name), context)) == k
    assert checked_selection(policy_named(name), context).tolist() == context.positions.tolist(), "k = N"


@pytest.mark.parametrize("name", UNBOUND)
@settings(max_examples=60, deadline=None)
@given(context=contexts(st.floats(width=32, min_value=0) | st.just(float("nan"))))
def test_exactly_k_distinct_reusable_positions_and_again(name: str, context: SelectionContext) -> None:
    policy, seeded = policy_named(name), context.rng.bit_generator.state
    first = checked_selection(policy, context)
    context.rng.bit_generator.state = seeded
    assert checked_selection(policy, context).tolist() == first.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_no_state_between_requests(name: str) -> None:
    layout, deviation = SHAPES["zeroed separators"]
    used, fresh = policy_named(name), policy_named(name)
    k = budget_of(used, len(deviation), 0.4)
    for seed in range(5):
        used.select(context_of("d9 d2", range(11), budget_of(used, 11, 0.4), seed=seed))
        chosen = used.select(context_of(layout, deviation, k, seed=seed))
        assert chosen.tolist() == fresh.select(context_of(layout, deviation, k, seed=seed)).tolist()
    assert used == fresh


@pytest.mark.parametrize("name", NAMES)
def test_leaves_the_context_as_it_was(name: str) -> None:
    policy = policy_named(name)
    context = context_of("i2 d3 d3", [1, np.nan, 2, 3, np.nan, np.inf, 0, 0], budget_of(policy, 8, 0.5))
    context.deviation.setflags(write=False)
    context.positions.setflags(write=False)
    checked_selection(policy, context)
    assert context.positions.tolist() == list(range(8))


@pytest.mark.parametrize(("name", "expected"), [("none", []), ("all", [0, 1, 3, 4, 5])])
def test_bounds_take_nothing_and_everything_whatever_the_ratio(name: str, expected: list[int]) -> None:
    policy = policy_named(name)
    for ratio in (0.01, 0.5, 1.0):
        k = budget_of(policy, 5, ratio)
        chosen = checked_selection(policy, context_of("i2 s1- d3", [5, 4, 3, 2, 1], k))
        assert chosen.tolist() == expected
    assert budget_of(policy, 0, 0.5) == 0


class Returning(Policy):
    """A broken policy: it returns what it was given."""

    name = "broken"

    def __init__(self, chosen: object) -> None:
        self.chosen = chosen

    def select(self, context: SelectionContext) -> object:
        return self.chosen


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ([0], "returned 1 positions, not k = 2"),
        ([0, 1, 3], "returned 3 positions, not k = 2"),
        ([], "returned 0 positions, not k = 2"),
        ([1, 1], "returned a position twice"),
        ([0, 2], "returned a position that is not reusable"),
        ([0, -1], "returned a position that is not reusable"),
        ([0, 99], "returned a position that is not reusable"),
        ([0.0, 1.0], "returned float64 of shape (2,), not positions"),
        ([True, False], "returned bool of shape (2,), not positions"),
        ([[0, 1]], "returned int64 of shape (1, 2), not positions"),
        (["0", "1"], "returned <U1 of shape (2,), not positions"),
        (None, "returned object of shape (), not positions"),
    ],
)
def test_a_broken_selection_is_an_error_that_names_the_policy(chosen: object, complaint: str) -> None:
    with pytest.raises(PolicyError) as raised:
        checked_selection(Returning(chosen), context_of("d2 s1- d2", [1, 2, 3, 4], 2))
    assert raised.value.message == f"policy 'broken' {complaint} for request 'request-1'"
    assert raised.value.exit_code == 3


class Budgeting(Returning):
    """A policy whose budget is what it was given."""

    def budget(self, request: BudgetContext) -> object:
        return self.chosen


@pytest.mark.parametrize("k", [-1, 5, 2.0, None, "2", True, np.float32(1), np.int64(5)])
def test_a_broken_budget_is_an_error_that_names_the_policy(k: object) -> None:
    with pytest.raises(PolicyError) as raised:
        budget_of(Budgeting(k), 4, 0.5)
    assert raised.value.message == f"policy 'broken' returned budget {k!r} for 4 reusable tokens"


@pytest.mark.parametrize("k", [0, 4, np.int64(3)])
def test_a_budget_from_0_to_n_is_a_plain_number(k: object) -> None:
    checked = budget_of(Budgeting(k), 4, 0.5)
    assert (checked, type(checked)) == (k, int)


def test_a_selection_is_returned_ascending_as_int64() -> None:
    chosen = checked_selection(Returning(np.array([4, 0], dtype=np.uint8)), context_of("d2 s1- d2", [1, 2, 3, 4], 2))
    assert chosen.tolist() == [0, 4]
    assert chosen.dtype == np.int64


def test_an_empty_selection_is_a_selection_when_nothing_is_asked_for() -> None:
    assert checked_selection(Returning([]), context_of("d1", [1], 0)).tolist() == []
