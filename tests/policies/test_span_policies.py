from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from policy_contexts import context_of, contexts

from kvaudit.policies import Policy, SelectionContext, checked_selection
from kvaudit.policies.spans import DocumentAligned, FixedChunk, RandomDocument, SingleWindow
from kvaudit.records import GAP_KINDS

Indices = list[int]


def chosen(policy: Policy, context: SelectionContext) -> list[int]:
    return checked_selection(policy, context).tolist()


class TestSingleWindow:
    @pytest.mark.parametrize(
        ("deviation", "k", "expected"),
        [
            ([1, 9, 2, 5, 5, 1], 2, [1, 2]),
            ([1, 4, 1, 5, 5, 1], 2, [3, 4]),
            ([2, 2, 2, 2, 2, 2], 3, [0, 1, 2]),
            ([0, 3, 0, 0, 3, 0], 2, [0, 1]),
            ([np.nan, 1, np.nan, np.nan, 2, 2], 2, [4, 5]),
            ([5, 5, 5, np.inf, 0, 0], 1, [3]),
        ],
    )
    def test_first_window_with_the_largest_sum(self, deviation: list[float], k: int, expected: list[int]) -> None:
        assert chosen(SingleWindow(), context_of("d6", deviation, k)) == expected

    def test_neighbours_are_neighbouring_reusable_tokens(self) -> None:
        context = context_of("d3 s1- d3", [1, 1, 7, 8, 1, 1], 3)
        assert chosen(SingleWindow(), context) == [1, 2, 4]

    def test_ignores_documents_and_separators(self) -> None:
        assert chosen(SingleWindow(), context_of("d2 s1 d2", [1, 6, 6, 6, 1], 3)) == [1, 2, 3]


class TestFixedChunk:
    def test_spans_lie_across_document_borders(self) -> None:
        context = context_of("d4 d4 d4", [0, 0, 0, 8, 8, 0, 0, 1, 1, 1, 0, 0], 4)
        assert chosen(FixedChunk(), context) == [2, 3, 4, 5], "spans [0 1][2-5][6-9][10 11]"

    def test_rank_is_by_mean_so_that_the_short_first_span_is_not_disfavoured(self) -> None:
        context = context_of("d4 d4 d4", [5, 5, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0], 3)
        assert chosen(FixedChunk(), context) == [0, 1, 2], "whole [0 1], then the first best window in [2-5]"

    def test_default_length_is_the_median_document_not_the_instruction_or_query(self) -> None:
        context = context_of("i2 d4 d4 q2", [0, 0, 0, 8, 8, 0, 0, 1, 1, 1, 0, 0], 4)
        assert chosen(FixedChunk(), context) == [2, 3, 4, 5]

    def test_without_documents_the_median_of_the_other_chunks(self) -> None:
        context = context_of("g1 m4 g1 m4 g1 m4", [0, 0, 5, 5, 5, 5, 0, 0, 9, 0, 0, 0, 0, 0, 0], 4)
        assert chosen(FixedChunk(), context) == [2, 3, 4, 5]


class TestDocumentAligned:
    def test_whole_spans_by_mean_while_they_fit_then_the_best_window_of_the_next(self) -> None:
        deviation = [9, 9, 1, 2, 3, 2, 5, 5, 5, 0, 0]
        context = context_of("i2 d4 d3 q2", deviation, 7)
        assert chosen(DocumentAligned(), context) == [0, 1, 3, 4, 6, 7, 8]

    def test_the_first_span_that_does_not_fit_ends_it(self) -> None:
        context = context_of("d4 d1 d1", [5, 6, 7, 5, 1, 1], 2)
        assert chosen(DocumentAligned(), context) == [1, 2], "not the two small documents that would fit"

    def test_the_first_window_on_ties(self) -> None:
        assert chosen(DocumentAligned(), context_of("d2 d4", [9, 9, 1, 1, 1, 1], 4)) == [0, 1, 2, 3]

    def test_equal_means_go_by_position(self) -> None:
        assert chosen(DocumentAligned(), context_of("d3 d2 d1", [0.1] * 6, 4)) == [0, 1, 2, 3]

    def test_mean_not_sum_ranks(self) -> None:
        assert chosen(DocumentAligned(), context_of("d5 d2", [3, 3, 3, 3, 3, 4, 4], 2)) == [5, 6]

    def test_spans_are_cut_to_their_reusable_tokens(self) -> None:
        context = context_of("d4 d4- d4", [1, 1, 1, 6, 6, 5], 3, holes=[2, 9])
        assert chosen(DocumentAligned(), context) == [8, 10, 11], "the mean is over reusable tokens"

    def test_windows_pass_over_holes(self) -> None:
        context = context_of("d6", [0, 0, 4, 4, 0], 2, holes=[3])
        assert chosen(DocumentAligned(), context) == [2, 4]

    def test_separators_come_after_every_document_whatever_their_deviation(self) -> None:
        context = context_of("i1 s2 d2 s1 d2", [1, 99, 99, 2, 2, 50, 3, 3], 5)
        assert chosen(DocumentAligned(), context) == [0, 3, 4, 6, 7]
        context = context_of("i1 s2 d2 s1 d2", [1, 99, 98, 2, 2, 50, 3, 3], 6)
        assert chosen(DocumentAligned(), context) == [0, 1, 3, 4, 6, 7]

    def test_glue_beside_a_separator_is_one_run_and_a_missed_document_parts_two(self) -> None:
        touching = context_of("d1 g1 s1 d1", [0, 5, 6, 0], 3)
        assert chosen(DocumentAligned(), touching) == [0, 2, 3], "the best window in the run [1 2]"
        parted = context_of("d1 s1 d2- s1 d1", [0, 5, 6, 0], 3)
        assert chosen(DocumentAligned(), parted) == [0, 4, 5]

    def test_a_document_that_occurs_twice_is_two_spans(self) -> None:
        assert chosen(DocumentAligned(), context_of("d2 d2 d2", [1, 1, 3, 3, 2, 2], 4)) == [2, 3, 4, 5]

    def test_an_infinite_document_comes_first_and_spoils_no_other(self) -> None:
        context = context_of("d3 d2 d2", [1, 2, 2, np.inf, 0, np.nan, 1], 4)
        assert chosen(DocumentAligned(), context) == [1, 2, 3, 4]


class TestRandomDocument:
    def test_order_is_drawn_from_the_generator_and_deviation_plays_no_part_in_it(self) -> None:
        first = {
            tuple(chosen(RandomDocument(), context_of("i2 d2 d2 q2", [9, 9, 0, 0, 1, 1, 2, 2], 2, seed=seed)))
            for seed in range(60)
        }
        assert first == {(0, 1), (2, 3), (4, 5), (6, 7)}

    def test_what_is_left_is_the_best_window_of_the_next_document(self) -> None:
        for seed in range(20):
            picked = chosen(RandomDocument(), context_of("d3 d3", [1, 2, 2, 4, 4, 1], 5, seed=seed))
            assert picked in ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])

    def test_separators_come_after_every_document(self) -> None:
        for seed in range(20):
            assert chosen(RandomDocument(), context_of("d2 s1 d2", [0, 0, 9, 0, 0], 4, seed=seed)) == [0, 1, 3, 4]


def slow_window(deviation: Sequence[Fraction], inside: Indices, length: int) -> Indices:
    windows = [inside[start : start + length] for start in range(len(inside) - length + 1)]
    best = windows[0]
    for window in windows:
        if sum(deviation[i] for i in window) > sum(deviation[i] for i in best):
            best = window
    return best


def slow_fill(context: SelectionContext, ranked: Sequence[Indices]) -> list[int]:
    deviation, taken = [Fraction(float(value)) for value in context.deviation], []
    for span in ranked:
        if len(span) > context.k - len(taken):
            if context.k > len(taken):
                taken += slow_window(deviation, span, context.k - len(taken))
            break
        taken += span
    return sorted(context.positions[taken].tolist())


def slow_documents(context: SelectionContext) -> tuple[list[Indices], list[Indices]]:
    documents, rest = [], []
    for segment in context.segments:
        inside = [i for i, position in enumerate(context.positions) if segment.start <= position < segment.end]
        if segment.kind not in GAP_KINDS:
            documents.append(inside)
            continue
        for i in inside:
            if rest and context.positions[i] == context.positions[rest[-1][-1]] + 1:
                rest[-1].append(i)
            else:
                rest.append([i])
    return [span for span in documents if span], rest


def slow_by_mean(context: SelectionContext, spans: Sequence[Indices]) -> list[Indices]:
    mean = [sum(Fraction(float(context.deviation[i])) for i in span) / len(span) for span in spans]
    return [spans[j] for j in sorted(range(len(spans)), key=lambda j: (-mean[j], spans[j][0]))]


def slow_single_window(context: SelectionContext) -> list[int]:
    return slow_fill(context, [list(range(len(context.positions)))])


def slow_document_aligned(context: SelectionContext) -> list[int]:
    documents, rest = slow_documents(context)
    return slow_fill(context, slow_by_mean(context, documents) + slow_by_mean(context, rest))


def slow_length(context: SelectionContext) -> int:
    """The lower median: of the documents, else of the other chunks, else of all segments."""
    groups: list[list[int]] = [[], [], []]
    for segment in context.segments:
        rank = 0 if segment.kind == "document" else 2 if segment.kind in ("separator", "glue") else 1
        for group in groups[rank:]:
            group.append(segment.end - segment.start)
    lengths = sorted(next(group for group in groups if group))
    return lengths[(len(lengths) - 1) // 2]


def slow_fixed_chunk(context: SelectionContext) -> list[int]:
    length = slow_length(context)
    spans: list[Indices] = [[]]
    for i in range(len(context.positions)):
        if i >= length // 2 and (i - length // 2) % length == 0:
            spans.append([])
        spans[-1].append(i)
    return slow_fill(context, slow_by_mean(context, [span for span in spans if span]))


@pytest.mark.parametrize(
    ("policy", "slow"),
    [
        (SingleWindow(), slow_single_window),
        (FixedChunk(), slow_fixed_chunk),
        (DocumentAligned(), slow_document_aligned),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
@settings(max_examples=200, deadline=None)
@given(context=contexts())
def test_same_as_the_rule_in_loops(
    policy: Policy, slow: Callable[[SelectionContext], list[int]], context: SelectionContext
) -> None:
    assert chosen(policy, context) == slow(context)


@settings(max_examples=100, deadline=None)
@given(context=contexts())
def test_random_document_is_the_rule_for_some_order_of_documents(context: SelectionContext) -> None:
    documents, rest = slow_documents(context)
    allowed = [
        slow_fill(context, [*documents_order, *rest_order])
        for documents_order in permutations(documents[:5])
        for rest_order in permutations(rest)
    ]
    assert len(documents) > 5 or chosen(RandomDocument(), context) in allowed
