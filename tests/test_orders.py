import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.errors import UsageError
from kvaudit.orders import MOST_ORDERS, SEEDS, make_orders, shuffled

seeds = st.integers(0, SEEDS - 1)


@given(requests=st.integers(2, 40), count=st.integers(2, 8), seed=seeds)
def test_orders_are_distinct_permutations(requests, count, seed):
    if math.factorial(requests) < count:
        with pytest.raises(UsageError):
            make_orders(requests, count, seed)
        return
    orders = make_orders(requests, count, seed)
    assert len({order.permutation for order in orders}) == len(orders) == count
    assert all(sorted(order.permutation) == list(range(requests)) for order in orders)


@given(requests=st.integers(4, 40), count=st.integers(2, 8), seed=seeds)
def test_first_comes_the_trace_as_it_was_then_backwards_then_numbered_shuffles(requests, count, seed):
    orders = make_orders(requests, count, seed)
    expected = ["chronological", "reversed", *(f"shuffle-{i}" for i in range(1, count - 1))]
    assert [order.name for order in orders] == expected
    assert orders[0].permutation == tuple(range(requests))
    assert orders[1].permutation == tuple(reversed(range(requests)))


@given(requests=st.integers(4, 40), count=st.integers(3, 8), seed=seeds)
def test_a_recorded_seed_rebuilds_its_shuffle(requests, count, seed):
    chronological, backwards, *shuffles = make_orders(requests, count, seed)
    assert chronological.seed is backwards.seed is None
    assert all(shuffled(requests, order.seed) == order.permutation for order in shuffles)


@given(requests=st.integers(5, 40), count=st.integers(3, 7), seed=seeds)
def test_more_orders_keep_the_first_ones(requests, count, seed):
    assert make_orders(requests, count + 1, seed)[:count] == make_orders(requests, count, seed)


def test_the_shuffle_of_a_seed_never_changes():
    assert shuffled(8, 0) == (3, 7, 5, 2, 4, 1, 6, 0)
    assert [(order.seed, order.permutation) for order in make_orders(6, 4, 7)[2:]] == [
        (1390851134, (1, 0, 2, 5, 3, 4)),
        (647892268, (2, 3, 5, 0, 4, 1)),
    ]


def test_another_seed_gives_other_shuffles():
    assert make_orders(20, 5, 1)[2:] != make_orders(20, 5, 2)[2:]


def test_every_permutation_of_a_short_trace_can_be_asked_for():
    assert len(make_orders(4, 24, 0)) == 24


@pytest.mark.parametrize(
    ("requests", "count", "message"),
    [
        (3, 7, "a trace with 3 requests has 6 distinct orders, not 7"),
        (2, 5, "a trace with 2 requests has 2 distinct orders, not 5"),
        (1, 2, "a trace with 1 request has 1 distinct order, not 2"),
        (0, 2, "a trace with 0 requests has 1 distinct order, not 2"),
        (9, 1, "1 order cannot show answer variation"),
        (9, 0, "0 orders cannot show answer variation"),
    ],
)
def test_too_few_orders_are_refused_with_the_reason(requests, count, message):
    with pytest.raises(UsageError, match=message):
        make_orders(requests, count, 0)


def test_a_negative_seed_is_refused():
    with pytest.raises(UsageError, match="seed is -1"):
        make_orders(9, 5, -1)


@pytest.mark.parametrize(("count", "seed"), [(MOST_ORDERS + 1, 0), (5, SEEDS)])
def test_more_than_a_manifest_or_an_audit_can_hold_is_refused(count, seed):
    with pytest.raises(UsageError, match=r"more than an audit can use|the seed is"):
        make_orders(40, count, seed)
