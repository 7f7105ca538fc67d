from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from policy_contexts import context_of, contexts

from kvaudit.policies import SelectionContext, checked_selection
from kvaudit.policies.tokens import TokenTopK


@pytest.mark.parametrize(
    ("deviation", "k", "chosen"),
    [
        ([1, 5, 2, 4], 2, [1, 3]),
        ([3, 5, 3, 3], 2, [0, 1]),
        ([3, 3, 3, 3], 3, [0, 1, 2]),
        ([0, 0, 7, 0], 3, [0, 1, 2]),
        ([np.nan, 0, np.nan, 0], 2, [1, 3]),
        ([np.nan, 0, np.nan, 0], 3, [0, 1, 3]),
        ([np.inf, 1, np.nan, 2], 2, [0, 3]),
    ],
)
def test_largest_deviation_first_then_the_lower_position(deviation: list[float], k: int, chosen: list[int]) -> None:
    assert checked_selection(TokenTopK(), context_of("d4", deviation, k)).tolist() == chosen


def test_positions_are_those_of_the_prompt() -> None:
    context = context_of("i2- d3 s1 d2", [1, 9, 1, 8, 1, 7], 3)
    assert checked_selection(TokenTopK(), context).tolist() == [3, 5, 7]


@settings(max_examples=200, deadline=None)
@given(context=contexts())
def test_same_as_sorting_every_token(context: SelectionContext) -> None:
    ranked = sorted(zip(-context.deviation, context.positions, strict=True))
    expected = sorted(int(position) for _, position in ranked[: context.k])
    assert checked_selection(TokenTopK(), context).tolist() == expected
