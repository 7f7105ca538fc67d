"""The orders in which a trace is replayed: as it came, backwards, then seeded shuffles."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from kvaudit.errors import UsageError
from kvaudit.records import CHRONOLOGICAL, REVERSED, Order

_SEEDS = 2**32


MOST_ORDERS = 1000
SEEDS = 2**62
"""Seeds of shuffles count on from the given one and stay numbers of 64 bits."""


def make_orders(requests: int, count: int, seed: int) -> tuple[Order, ...]:
    """`count` distinct permutations of `requests` requests: chronological, reversed, shuffle-1, shuffle-2, ...

    Each shuffle records the seed that `shuffled` rebuilds it from. Raises UsageError when `count` is below two, since
    one order has nothing to be compared with, and when so few requests have no `count` distinct orders.
    """
    if count < 2:
        raise UsageError(
            f"{count} order{'' if count == 1 else 's'} cannot show answer variation: there is nothing to compare",
            "ask for two orders or more",
        )
    if count > MOST_ORDERS:
        raise UsageError(f"{count} orders are more than an audit can use", f"ask for {MOST_ORDERS} at most")
    if not 0 <= seed < SEEDS:
        raise UsageError(f"the seed is {seed}", f"give a seed from 0 to {SEEDS - 1}")
    if not _has_permutations(requests, count):
        raise UsageError(
            f"a trace with {requests} request{'' if requests == 1 else 's'} has {math.factorial(requests)} distinct "
            f"order{'' if requests < 2 else 's'}, not {count}",
            "ask for fewer orders or record more requests" if requests > 1 else "record more requests",
        )
    chronological = tuple(range(requests))
    orders = [Order(CHRONOLOGICAL, None, chronological), Order(REVERSED, None, chronological[::-1])]
    seen = {order.permutation for order in orders}
    seeds = _order_seeds(seed)
    while len(orders) < count:
        order_seed = next(seeds)
        permutation = shuffled(requests, order_seed)
        if permutation not in seen:
            seen.add(permutation)
            orders.append(Order(f"shuffle-{len(orders) - 1}", order_seed, permutation))
    return tuple(orders)


def shuffled(requests: int, seed: int) -> tuple[int, ...]:
    """A permutation that depends on the seed alone, on every platform and Python version.

    Python promises the sequence of `random()` for a seed, and that of no other method, so requests are sorted by it.
    """
    draw = random.Random(seed).random
    keys = [draw() for _ in range(requests)]
    return tuple(sorted(range(requests), key=keys.__getitem__))


def _order_seeds(seed: int) -> Iterator[int]:
    draw = random.Random(seed).random
    while True:
        yield int(draw() * _SEEDS)


def _has_permutations(requests: int, count: int) -> bool:
    permutations = 1
    for factor in range(2, requests + 1):
        permutations *= factor
        if permutations >= count:
            return True
    return permutations >= count
