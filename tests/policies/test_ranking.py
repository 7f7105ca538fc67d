"""The rankings that policies share, against the same rules in loops."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain
from math import fsum, inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import EXACT, context_of, contexts

from kvaudit.policies import SelectionContext
from kvaudit.policies.ranking import (
    apportion,
    best_window,
    by_mean,
    document_spans,
    filled,
    segment_spans,
    tiles,
    top_k,
)
from kvaudit.records import GAP_KINDS

values = st.lists(st.floats(width=32) | st.sampled_from([nan, 0.0, 1.0, inf, -inf]), min_size=1, max_size=20)


@settings(max_examples=300, deadline=None)
@given(signal=values, data=st.data())
def test_top_k_is_the_head_of_all_sorted_with_what_is_no_number_last(signal: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(signal)))
    ranked = sorted(range(len(signal)), key=lambda i: (np.isnan(signal[i]), -np.nan_to_num(signal[i], nan=0.0), i))
    assert sorted(top_k(np.array(signal, dtype=np.float32), k).tolist()) == sorted(ranked[:k])


def test_top_k_tells_the_smallest_value_from_none() -> None:
    assert top_k(np.array([nan, -inf, nan]), 1).tolist() == [1]
    assert top_k(np.array([nan, -inf, nan]), 2).tolist() == [1, 0]


spans_and_values = st.lists(st.lists(EXACT | st.just(nan), min_size=1, max_size=5), min_size=1, max_size=6)


def as_spans(groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.cumsum([len(group) for group in groups])
    return np.stack((ends - [len(group) for group in groups], ends), axis=1), np.concatenate(groups).astype(np.float32)


def slow_mean(group: list[float]) -> Fraction:
    return sum((Fraction(value) for value in group if not np.isnan(value)), Fraction(0)) / len(group)


@settings(max_examples=200, deadline=None)
@given(groups=spans_and_values)
def test_by_mean_counts_what_is_no_number_as_0_and_puts_spans_of_nothing_else_last(groups: list[list[float]]) -> None:
    spans, signal = as_spans(groups)
    order = sorted(range(len(groups)), key=lambda i: (bool(np.isnan(groups[i]).all()), -slow_mean(groups[i]), i))
    assert by_mean(spans, signal).tolist() == spans[order].tolist()


@settings(max_examples=200, deadline=None)
@given(groups=spans_and_values, data=st.data())
def test_filled_takes_whole_spans_in_order_and_a_window_of_the_first_that_does_not_fit(
    groups: list[list[float]], data: st.DataObject
) -> None:
    spans, signal = as_spans(groups)
    spans = spans[data.draw(st.permutations(range(len(groups))))]
    k = data.draw(st.integers(0, len(signal) + 2))
    expected: list[int] = []
    for start, end in spans.tolist():
        left = k - len(expected)
        if end - start > left:
            windows = [range(first, first + left) for first in range(start, end - left + 1)]
            if left:
                expected += max(windows, key=lambda window: sum(np.nan_to_num(signal[list(window)])))
            break
        expected += range(start, end)
    assert filled(spans, signal, k).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(numbers=st.lists(st.floats(width=32, min_value=0, max_value=2.0**100), min_size=1, max_size=40), data=st.data())
def test_no_window_has_a_larger_sum_whatever_the_range_of_values(numbers: list[float], data: st.DataObject) -> None:
    length = data.draw(st.integers(1, len(numbers)))
    sums = [fsum(numbers[start : start + length]) for start in range(len(numbers) - length + 1)]
    start = best_window(np.array(numbers), length)
    assert sums[start] >= max(sums) * (1 - 1e-14)
    assert all(earlier < sums[start] * (1 + 1e-14) for earlier in sums[:start])


def test_an_infinite_value_spoils_no_window_that_it_is_not_in() -> None:
    assert best_window(np.array([1, np.inf, 2, 3]), 2) == 0
    assert best_window(np.array([np.inf, 0, 7, 8, 0, 0]), 1) == 0


@settings(max_examples=200, deadline=None)
@given(context=contexts())
def test_segments_and_documents_are_cut_to_their_reusable_tokens(context: SelectionContext) -> None:
    positions = context.positions.tolist()
    inside = [[i for i, p in enumerate(positions) if s.start <= p < s.end] for s in context.segments]
    found = [list(range(start, end)) for start, end in segment_spans(context.segments, context.positions).tolist()]
    assert found == inside
    chunks, rest = ([list(range(start, end)) for start, end in spans.tolist()] for spans in document_spans(context))
    is_gap = [segment.kind in GAP_KINDS for segment in context.segments]
    assert chunks == [group for group, gap in zip(inside, is_gap, strict=True) if group and not gap]
    in_gaps = chain.from_iterable(group for group, gap in zip(inside, is_gap, strict=True) if gap)
    assert list(chain.from_iterable(rest)) == list(in_gaps)
    assert all(positions[b] - positions[a] == b - a for a, b in ((run[0], run[-1]) for run in rest))


@settings(max_examples=200, deadline=None)
@given(context=contexts(), length=st.integers(0, 5))
def test_tiles_cover_every_token_once_and_cross_no_border(context: SelectionContext, length: int) -> None:
    pieces = [list(range(start, end)) for start, end in tiles(context, length).tolist()]
    assert list(chain.from_iterable(pieces)) == list(range(len(context.positions)))
    whole = sorted(np.concatenate(document_spans(context)).tolist())
    expected = []
    for start, end in whole:
        step = length or end - start
        expected += [list(range(first, min(first + step, end))) for first in range(start, end, step)]
    assert pieces == expected


def test_tiles_start_anew_in_each_chunk() -> None:
    assert tiles(context_of("i3 d5 s1 d2", [0] * 11, 1), 2).tolist() == [
        [0, 2],
        [2, 3],
        [3, 5],
        [5, 7],
        [7, 8],
        [8, 9],
        [9, 11],
    ]


@pytest.mark.parametrize(
    ("total", "weights", "capacities", "shares"),
    [
        (10, [1, 1, 1], [9, 9, 9], [4, 3, 3]),
        (10, [1, 1, 1], [9, 2, 9], [4, 2, 4]),
        (10, [3, 1, 1], [4, 9, 9], [4, 3, 3]),
        (10, [6, 3, 1], [9, 9, 9], [6, 3, 1]),
        (2, [5, 3, 2], [9, 9, 9], [1, 1, 0]),
        (7, [0, 1, nan], [9, 5, 9], [0, 5, 0]),
        (3, [0, 0, 0], [9, 9, 9], [0, 0, 0]),
        (0, [1, 1, 1], [9, 9, 9], [0, 0, 0]),
        (30, [1, 2, 3], [3, 2, 1], [3, 2, 1]),
    ],
)
def test_shares_are_in_proportion_and_what_one_cannot_hold_goes_to_the_others(
    total: int, weights: list[float], capacities: list[int], shares: list[int]
) -> None:
    assert apportion(total, np.array(weights, dtype=np.float64), np.array(capacities)).tolist() == shares


def slow_apportion(total: int, weights: list[int], capacities: list[int]) -> tuple[list[int], bool]:
    """Exact shares, one full party at a time; then whole parts and the largest remainders. And whether it was a tie."""
    shares = [Fraction(0)] * len(weights)
    unfilled = [i for i, weight in enumerate(weights) if weight and capacities[i]]
    left = Fraction(min(total, sum(capacities[i] for i in unfilled)))
    while unfilled:
        for i in unfilled:
            shares[i] = left * weights[i] / sum(weights[j] for j in unfilled)
        over = max(unfilled, key=lambda i: shares[i] / capacities[i])
        if shares[over] <= capacities[over]:
            break
        shares[over] = Fraction(capacities[over])
        left -= capacities[over]
        unfilled.remove(over)
    whole = [int(share) for share in shares]
    ranked = sorted(range(len(shares)), key=lambda i: whole[i] - shares[i])
    more = int(sum(shares)) - sum(whole)
    remainders = [shares[i] - whole[i] for i in ranked]
    for i in ranked[:more]:
        whole[i] += 1
    return whole, 0 < more < len(shares) and remainders[more - 1] == remainders[more]


@settings(max_examples=300, deadline=None)
@given(
    parties=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=7),
    total=st.integers(0, 40),
)
def test_shares_are_those_of_the_rule_in_loops(parties: list[tuple[int, int]], total: int) -> None:
    weights, capacities = [weight for weight, _ in parties], [capacity for _, capacity in parties]
    found = apportion(total, np.array(weights, dtype=np.float64), np.array(capacities)).tolist()
    expected, tie = slow_apportion(total, weights, capacities)
    assert sum(found) == sum(expected)
    assert all(0 <= share <= capacity for share, capacity in zip(found, capacities, strict=True))
    # Of different weights with the same remainder, rounding decides.
    if not tie or len(set(weights)) == 1:
        assert found == expected
