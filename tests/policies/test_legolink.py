"""LegoLink: the first tokens of every chunk after the first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import context_of, contexts, for_policy

from kvaudit.policies import BudgetContext, SelectionContext, checked_budget, checked_selection
from kvaudit.policies.legolink import LegoLink
from kvaudit.records import GAP_KINDS


def chosen(layout: str, reusable: int, k: int, holes: tuple[int, ...] = ()) -> list[int]:
    context = context_of(layout, [0.0] * reusable, k, holes=holes, needs=frozenset())
    return checked_selection(LegoLink(), context).tolist()


@pytest.mark.parametrize(
    ("layout", "reusable", "k", "expected"),
    [
        # Documents at 3-7, 8-12, 13-17: two of each.
        ("i3 d5 d5 d5", 18, 6, [3, 4, 8, 9, 13, 14]),
        # 7 = 3 + 2 + 2: what does not divide goes to the earliest.
        ("i3 d5 d5 d5", 18, 7, [3, 4, 5, 8, 9, 13, 14]),
        # The second has one token only: 7 = 3 + 1 + 3.
        ("i3 d5 d1 d5", 14, 7, [3, 4, 5, 8, 9, 10, 11]),
        # Fewer tokens than chunks: the earliest have one each.
        ("i3 d5 d5 d5", 18, 2, [3, 8]),
        # All 15 of the documents, then the first chunk from its start.
        ("i3 d5 d5 d5", 18, 17, [0, 1, *range(3, 18)]),
        # A query that is a hit is a chunk like any other.
        ("i3 d5 q2", 10, 3, [3, 4, 8]),
        # Separators at 2 and 6 come last, after the first chunk.
        ("i2 s1 d3 s1 d2", 9, 4, [3, 4, 7, 8]),
        ("i2 s1 d3 s1 d2", 9, 7, [0, 1, 3, 4, 5, 7, 8]),
        ("i2 s1 d3 s1 d2", 9, 8, [0, 1, 2, 3, 4, 5, 7, 8]),
        # The first chunk was missed: every other one comes after it.
        ("i3- d4 d4", 8, 4, [3, 4, 7, 8]),
        # What stands before the first chunk is no chunk.
        ("g1 i3 d4", 8, 2, [4, 5]),
        ("d6", 6, 2, [0, 1]),
        ("s3 g2", 5, 2, [0, 1]),
    ],
)
def test_the_first_tokens_of_every_chunk_after_the_first(
    layout: str, reusable: int, k: int, expected: list[int]
) -> None:
    assert chosen(layout, reusable, k) == expected


def test_the_first_reusable_tokens_of_a_chunk_in_which_some_are_not() -> None:
    assert chosen("i2 d4 d4", 8, 4, holes=(2, 7)) == [3, 4, 6, 8]


def budget(layout: str, reusable: int, k: int | None, ratio: float = 0.5) -> int:
    context = context_of(layout, [0.0] * reusable, 0)
    request = BudgetContext(reusable, ratio, context.segments, context.positions)
    return checked_budget(LegoLink(k), request)


@pytest.mark.parametrize(
    ("layout", "reusable", "k", "expected"),
    [
        ("i3 d5 d5 d5", 18, 2, 6),
        ("i3 d5 d1 d5", 14, 4, 9),
        ("i3 d5 d5- d5", 13, 2, 4),
        ("i3- d4 d4", 8, 1, 2),
        ("i3 s1 d2 s1", 7, 64, 2),
        ("i3", 3, 8, 0),
        ("i3 d5 d5 d5", 18, None, 9),
    ],
)
def test_k_a_chunk_is_its_own_budget_whatever_the_ratio(
    layout: str, reusable: int, k: int | None, expected: int
) -> None:
    assert budget(layout, reusable, k) == expected
    assert k is None or budget(layout, reusable, k, ratio=0.01) == expected


def test_with_its_own_budget_every_chunk_has_k_or_all_it_has() -> None:
    context = context_of("i3 d5 d1 d5", [0.0] * 14, budget("i3 d5 d1 d5", 14, 4), needs=frozenset())
    assert checked_selection(LegoLink(4), context).tolist() == [3, 4, 5, 6, 8, 9, 10, 11, 12]


def slow_legolink(context: SelectionContext) -> list[int]:
    """One token at a time to the chunk that has the fewest, the earliest on ties."""
    reusable = set(context.positions.tolist())
    queues = [[p for p in range(s.start, s.end) if p in reusable] for s in context.segments]
    chunks = [i for i, segment in enumerate(context.segments) if segment.kind not in GAP_KINDS]
    gaps = [i for i, segment in enumerate(context.segments) if segment.kind in GAP_KINDS]
    given, others = dict.fromkeys(chunks[1:], 0), [p for i in [*chunks[:1], *gaps] for p in queues[i]]
    selected: list[int] = []
    while len(selected) < context.k:
        hungry = [i for i in given if given[i] < len(queues[i])]
        if not hungry:
            selected += others[: context.k - len(selected)]
            break
        least = min(hungry, key=lambda i: (given[i], i))
        selected.append(queues[least][given[least]])
        given[least] += 1
    return sorted(selected)


@settings(max_examples=300, deadline=None)
@given(context=contexts(st.just(0.0)))
def test_same_as_dealing_tokens_out_one_by_one(context: SelectionContext) -> None:
    assert checked_selection(LegoLink(), for_policy(LegoLink(), context)).tolist() == slow_legolink(context)
