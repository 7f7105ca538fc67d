"""What every registered policy must do, whatever it prefers; one table, all policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import context_of, contexts, for_policy

from kvaudit.errors import PolicyError, UsageError
from kvaudit.plugins import BUILT_IN, load
from kvaudit.policies import (
    BudgetContext,
    Policy,
    SegmentView,
    SelectionContext,
    checked_budget,
    checked_schedule,
    checked_selection,
    ratio_budget,
)

NAMES = list(BUILT_IN["policies"])
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "cacheblend-gradual": [{"first": 3.0}, {"first": 2.0, "layers": 1}, {"first": 1.0}],
    "legolink": [{"k": 1}, {"k": 3}],
    "cacheclip": [{"group": 1}, {"group": 3}],
    "random-span": [{"length": 1}, {"length": 3}],
    "token-runs": [{"m": 0}, {"m": 1}, {"m": 3}, {"m": 100}],
    "oracle": [{"span": 1, "candidates": 1}, {"span": 2, "candidates": 3}],
}
OWN_BUDGET = ("none", "all", "legolink:k=1", "legolink:k=3")
MADE: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES} | {
    f"{name}:{','.join(f'{key}={value}' for key, value in parameters.items())}": (name, parameters)
    for name, several in PARAMETERS.items()
    for parameters in several
}
ANY_K = [made for made in MADE if made not in ("none", "all")]
"""Those that are given any k, even where their own budget would be another."""
COMMON_BUDGET = [made for made in MADE if made not in OWN_BUDGET]

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


def policy_named(made: str) -> Policy:
    name, parameters = MADE[made]
    return load("policies", name)(**parameters)


def budget_of(policy: Policy, reusable: int, ratio: float) -> int:
    whole = SegmentView("document", "d", 0, reusable, True)
    return checked_budget(policy, BudgetContext(reusable, ratio, [whole], np.arange(reusable)))


@pytest.mark.parametrize("name", NAMES)
def test_name_is_the_registered_one(name: str) -> None:
    assert policy_named(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_says_how_closely_it_follows_what_was_published_and_where_that_stands(name: str) -> None:
    plugin = BUILT_IN["policies"][name]
    assert plugin.standing in ("exact", "port", "described", "control")
    assert bool(plugin.source) == (plugin.standing != "control")
    assert plugin.needs


@pytest.mark.parametrize("name", COMMON_BUDGET)
@pytest.mark.parametrize(
    ("reusable", "ratio", "k"), [(0, 0.5, 0), (1, 0.05, 1), (19, 0.05, 1), (20, 0.05, 1), (7540, 0.05, 377), (8, 1, 8)]
)
def test_budget_is_the_ratio_rounded_down_and_at_least_one(name: str, reusable: int, ratio: float, k: int) -> None:
    assert budget_of(policy_named(name), reusable, ratio) == ratio_budget(reusable, ratio) == k


@pytest.mark.parametrize("name", ANY_K)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("error")
def test_exactly_k_at_extreme_shapes(name: str, shape: str) -> None:
    layout, values = SHAPES[shape]
    policy = policy_named(name)
    for k in range(len(values) + 1):
        context = for_policy(policy, context_of(layout, values, k))
        assert len(checked_selection(policy, context)) == k
    assert checked_selection(policy, context).tolist() == context.positions.tolist(), "k = N"


@pytest.mark.parametrize("name", ANY_K)
@settings(max_examples=40, deadline=None)
@given(context=contexts(st.floats(width=32, min_value=0) | st.just(float("nan"))))
def test_exactly_k_distinct_reusable_positions_and_again(name: str, context: SelectionContext) -> None:
    policy, seeded = policy_named(name), context.rng.bit_generator.state
    context = for_policy(policy, context)
    first = checked_selection(policy, context)
    context.rng.bit_generator.state = seeded
    assert checked_selection(policy, context).tolist() == first.tolist()


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=40, deadline=None)
@given(reusable=st.integers(0, 400), share=st.floats(0, 1), layers=st.integers(1, 40))
def test_a_schedule_spends_the_budget_of_everyone(name: str, reusable: int, share: float, layers: int) -> None:
    schedule = checked_schedule(policy_named(name), int(share * reusable), reusable, layers)
    assert schedule is None or name.startswith("cacheblend-gradual")


@pytest.mark.parametrize("name", NAMES)
def test_it_asks_for_every_signal_that_it_declares_and_for_no_other(name: str) -> None:
    policy = policy_named(name)
    k = budget_of(policy, 32, 0.25)
    context = for_policy(policy, context_of("i4 d9 s1 d9 d9", np.arange(32)[::-1], k))
    checked_selection(policy, context)
    assert set(context.signals.asked) == policy.needs
    for need in policy.needs:
        short = replace(context, needs=policy.needs - {need})
        with pytest.raises(PolicyError, match=f"policy '{policy.name}' asked for {need}"):
            policy.select(short)


def test_what_starts_at_the_first_layer() -> None:
    early = {"legolink", "prophetkv", "fusionrag", "cacheclip", "cache-craft"}
    assert {name for name in NAMES if policy_named(name).start == "first-layer"} == early


@pytest.mark.parametrize("name", NAMES)
def test_one_that_starts_at_the_first_layer_asks_for_no_deviation(name: str) -> None:
    policy = policy_named(name)
    assert policy.start == "check-layer" or not {need for need in policy.needs if need.endswith("deviation")}


@pytest.mark.parametrize("name", MADE)
def test_no_state_between_requests(name: str) -> None:
    layout, values = SHAPES["zeroed separators"]
    used, fresh = policy_named(name), policy_named(name)
    k = budget_of(used, len(values), 0.4)
    for seed in range(5):
        used.select(for_policy(used, context_of("d9 d2", range(11), budget_of(used, 11, 0.4), seed=seed)))
        first, again = (for_policy(used, context_of(layout, values, k, seed=seed)) for _ in range(2))
        assert used.select(first).tolist() == fresh.select(again).tolist()
    assert used == fresh


@pytest.mark.parametrize("name", MADE)
def test_leaves_the_context_as_it_was(name: str) -> None:
    policy = policy_named(name)
    context = context_of("i2 d3 d3", [1, np.nan, 2, 3, np.nan, np.inf, 0, 0], budget_of(policy, 8, 0.5))
    context = for_policy(policy, context)
    context.signals.values.setflags(write=False)
    context.positions.setflags(write=False)
    checked_selection(policy, context)
    assert context.positions.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("legolink", {"k": 0}, "policy 'legolink': k is 0 (it is 1 or more)"),
        ("cacheclip", {"group": 0}, "policy 'cacheclip': group is 0 (it is 1 or more)"),
        ("random-span", {"length": -1}, "policy 'random-span': length is -1 (it is 1 or more)"),
        ("token-runs", {"m": -1}, "policy 'token-runs': m is -1 (it is 0 or more)"),
        ("oracle", {"span": 0}, "policy 'oracle': span is 0 (it is 1 or more)"),
        ("oracle", {"candidates": 0}, "policy 'oracle': candidates is 0 (it is 1 or more)"),
        ("cacheblend-gradual", {"first": 0.9}, "policy 'cacheblend-gradual': first is 0.9 (it is 1 or more)"),
        ("cacheblend-gradual", {"first": float("nan")}, "policy 'cacheblend-gradual': first is nan (it is 1 or more)"),
        ("cacheblend-gradual", {"layers": 0}, "policy 'cacheblend-gradual': layers is 0 (it is 1 or more)"),
    ],
)
def test_impossible_parameters_are_a_usage_error(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        load("policies", name)(**parameters)
    assert str(raised.value) == message


@pytest.mark.parametrize(("name", "expected"), [("none", []), ("all", [0, 1, 3, 4, 5])])
def test_bounds_take_nothing_and_everything_whatever_the_ratio(name: str, expected: list[int]) -> None:
    policy = policy_named(name)
    for ratio in (0.01, 0.5, 1.0):
        k = budget_of(policy, 5, ratio)
        chosen = checked_selection(policy, for_policy(policy, context_of("i2 s1- d3", [5, 4, 3, 2, 1], k)))
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
