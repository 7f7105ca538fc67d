"""The permutation test of a switch against every exchange written out."""

from itertools import permutations, product
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvaudit.analysis.exchange import exchanged, smallest_p


def slow_p(shares):
    """Of all ways to hand each block's shares to the values, those that set the means as far apart or farther."""

    def spread(blocks):
        return np.var(np.mean(blocks, axis=0))

    blocks = [tuple(block) for block in np.array(shares).T]
    found = [spread(chosen) for chosen in product(*(list(permutations(block)) for block in blocks))]
    return sum(value >= spread(blocks) - 1e-12 for value in found) / len(found)


tables = st.integers(2, 3).flatmap(
    lambda values: st.lists(st.lists(st.integers(0, 4), min_size=values, max_size=values), min_size=2, max_size=4)
)


@given(tables)
@settings(max_examples=25, deadline=None)
def test_the_p_value_is_that_of_all_exchanges(blocks):
    events = np.array(blocks).T
    found = exchanged(events, np.full(events.shape, 4), 9_999, 0)
    assert found.p_value == pytest.approx(slow_p(events / 4))
    assert found.smallest_p == pytest.approx(factorial(len(events)) ** (1 - events.shape[1]))
    assert found.p_value >= found.smallest_p - 1e-12


def test_blocks_that_a_value_did_not_see_are_left_out():
    events, trials = np.array([[4, 4, 4, 9], [0, 0, 0, 0]]), np.array([[4, 4, 4, 9], [4, 4, 4, 0]])
    assert exchanged(events, trials, 999, 0) == exchanged(events[:, :3], trials[:, :3], 999, 0)
    assert exchanged(events[:, 3:], trials[:, 3:], 999, 0) is None


def test_one_block_tells_nothing():
    one = np.array([[4], [0]])
    assert exchanged(one, np.full((2, 1), 4), 999, 0) is None
    assert exchanged(one * 0, np.full((2, 1), 4), 999, 0) == (1.0, 1.0)


@pytest.mark.parametrize(("blocks", "expected"), [(9, 2**-8), (10, 1 / 1000), (1000, 1 / 1000)])
def test_random_exchanges_give_no_p_value_below_their_number(blocks, expected):
    assert smallest_p(2, blocks, 999) == pytest.approx(expected)
    events = np.array([np.full(blocks, 4), np.zeros(blocks, int)])
    found = exchanged(events, np.full((2, blocks), 4), 999, 0)
    assert found.p_value >= found.smallest_p
