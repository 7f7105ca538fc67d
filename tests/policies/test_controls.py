"""Controls: chance, the worst choice, runs of m tokens, and the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import EXACT, context_of, contexts, for_policy

from kvaudit.policies import Floats, Policy, Positions, SelectionContext, checked_selection
from kvaudit.policies.controls import LeastDeviation, RandomSpan, RandomToken, TokenRuns
from kvaudit.policies.oracle import Oracle
from kvaudit.policies.spans import DocumentAligned
from kvaudit.policies.tokens import TokenTopK
from kvaudit.records import GAP_KINDS

WITH_NAN = EXACT | st.just(nan)


def chosen(policy: Policy, context: SelectionContext) -> list[int]:
    return checked_selection(policy, context).tolist()


def test_random_tokens_are_drawn_evenly_from_the_contexts_generator() -> None:
    drawn = Counter(
        position
        for seed in range(400)
        for position in chosen(RandomToken(), context_of("d5 s1- d5", range(10), 3, seed=seed, needs=frozenset()))
    )
    assert sorted(drawn) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert all(90 <= count <= 150 for count in drawn.values()), "400 * 3 / 10 each"


def test_random_spans_are_the_runs_of_a_chunk_in_any_order_and_the_last_is_cut_at_its_end() -> None:
    found = {
        tuple(chosen(RandomSpan(2), context_of("d3 d4", range(7), 3, seed=seed, needs=frozenset())))
        for seed in range(200)
    }
    spans = [(0, 1), (2,), (3, 4), (5, 6)]
    expected = {
        tuple(sorted((*first, *second, *third)[:3]))
        for first in spans
        for second in spans
        for third in spans
        if len({first, second, third}) == 3
    }
    assert found == expected


@pytest.mark.parametrize(
    ("deviation", "k", "expected"),
    [
        ([3, 1, 2, 1, 0], 2, [1, 4]),
        ([3, 1, 2, 1, 0], 3, [1, 3, 4]),
        ([2, 2, 2, 2], 2, [0, 1]),
        ([nan, inf, 1, nan], 2, [1, 2]),
        ([nan, inf, 1, nan], 3, [0, 1, 2]),
    ],
)
def test_the_smallest_deviations_and_what_is_no_number_last(
    deviation: list[float], k: int, expected: list[int]
) -> None:
    assert chosen(LeastDeviation(), context_of(f"d{len(deviation)}", deviation, k)) == expected


class TestTokenRuns:
    @pytest.mark.parametrize(
        ("m", "k", "expected"),
        [
            # Runs of two in each document: 3-4 (mean 4), 7 (3.5), 0-1 (3), 5-6 (2), 2 (1).
            (2, 2, [3, 4]),
            (2, 3, [3, 4, 7]),
            # 0-1 does not fit whole: its larger token.
            (2, 4, [1, 3, 4, 7]),
            (2, 5, [0, 1, 3, 4, 7]),
            # Whole documents: 3-7 (3.1), 0-2 (7 / 3).
            (0, 5, [3, 4, 5, 6, 7]),
            (5, 6, [1, 3, 4, 5, 6, 7]),
            (1, 3, [1, 3, 4]),
        ],
    )
    def test_runs_of_m_by_mean_deviation(self, m: int, k: int, expected: list[int]) -> None:
        context = context_of("d3 d5", [2, 4, 1, 4, 4, 3, 1, 3.5], k)
        assert chosen(TokenRuns(m), context) == expected

    @settings(max_examples=200, deadline=None)
    @given(context=contexts(WITH_NAN))
    def test_runs_of_one_are_token_topk(self, context: SelectionContext) -> None:
        assert chosen(TokenRuns(1), context) == chosen(TokenTopK(), context)

    @pytest.mark.parametrize("m", [0, 6, 1000])
    @settings(max_examples=80, deadline=None)
    @given(context=contexts(WITH_NAN))
    def test_runs_of_a_document_are_document_aligned_where_no_gap_is_reusable(
        self, m: int, context: SelectionContext
    ) -> None:
        gaps = [p for s in context.segments if s.kind in GAP_KINDS for p in range(s.start, s.end)]
        if not np.isin(gaps, context.positions).any():
            assert chosen(TokenRuns(m), context) == chosen(DocumentAligned(), context)

    def test_gaps_compete_at_every_length(self) -> None:
        context = context_of("d2 s2 d2", [1, 1, 9, 9, 2, 2], 2)
        assert chosen(DocumentAligned(), context) == [4, 5]
        assert [chosen(TokenRuns(m), context) for m in (0, 1, 2)] == [[2, 3]] * 3

    def test_fragments_become_fewer_as_runs_become_longer(self) -> None:
        rng = np.random.default_rng(3)
        context = context_of("d64 d64 d64 d64", rng.exponential(size=256), 64)
        fragments = [1 + int((np.diff(chosen(TokenRuns(m), context)) > 1).sum()) for m in (1, 2, 4, 8, 16, 32, 0)]
        assert fragments == sorted(fragments, reverse=True)
        assert fragments[0] > 30
        assert fragments[-1] == 1


@dataclass(frozen=True)
class Output:
    """Signals of a request whose KL is a function of what was recomputed; notes what was asked."""

    values: Floats
    of: Callable[[frozenset[int]], float]
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def deviation(self) -> Floats:
        return self.values

    def output_kl(self, positions: Positions) -> float:
        assert np.array_equal(positions, np.unique(positions))
        self.asked.append(tuple(positions.tolist()))
        return self.of(frozenset(positions.tolist()))


def oracle_context(
    layout: str, deviation: Sequence[float], k: int, of: Callable[[frozenset[int]], float]
) -> tuple[SelectionContext, Output]:
    context = context_of(layout, deviation, k, needs=Oracle.needs)
    output = Output(context.signals.deviation(), of)
    return replace(context, signals=output), output


class TestOracle:
    # Six spans of two. The KL falls with what is recomputed of 4-5, and of 0-1 only together with 10-11.
    deviation = (6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1)

    @staticmethod
    def kl(recomputed: frozenset[int]) -> float:
        return 10.0 - 2 * len(recomputed & {4, 5}) - 3 * ({0, 10} <= recomputed) - len(recomputed & {8})

    def test_greedily_the_span_with_the_smallest_divergence_given_those_before(self) -> None:
        context, output = oracle_context("d12", self.deviation, 4, self.kl)
        assert chosen(Oracle(span=2), context) == [4, 5, 8, 9]
        steps = Counter(len(asked) for asked in output.asked)
        assert steps == {2: 6, 4: 5}, "six candidates, then five with the one that was taken"
        assert all({4, 5} <= set(asked) for asked in output.asked if len(asked) == 4)

    def test_ties_go_to_the_larger_deviation(self) -> None:
        context, _ = oracle_context("d12", self.deviation, 2, lambda recomputed: 1.0)
        assert chosen(Oracle(span=2), context) == [0, 1]

    def test_only_so_many_candidates_by_mean_deviation(self) -> None:
        context, output = oracle_context("d12", self.deviation, 2, self.kl)
        assert chosen(Oracle(span=2, candidates=2), context) == [0, 1]
        assert output.asked == [(0, 1), (2, 3)]

    def test_the_last_span_is_judged_and_taken_as_its_best_window(self) -> None:
        context, output = oracle_context("d12", [6, 5, 4, 5, 0, 9, 3, 3, 2, 2, 1, 1], 3, self.kl)
        assert chosen(Oracle(span=2), context) == [4, 5, 8]
        assert (0, 4, 5) in output.asked
        assert (3, 4, 5) in output.asked

    def test_what_the_candidates_cannot_hold_goes_to_the_next_by_deviation_without_asking(self) -> None:
        context, output = oracle_context("d12", self.deviation, 7, self.kl)
        assert chosen(Oracle(span=2, candidates=3), context) == [0, 1, 2, 3, 4, 5, 6]
        assert output.asked == []

    @pytest.mark.parametrize("k", [0, 12])
    def test_asks_nothing_where_there_is_no_choice(self, k: int) -> None:
        context, output = oracle_context("d12", self.deviation, k, self.kl)
        assert chosen(Oracle(span=2), context) == list(range(k))
        assert output.asked == []

    def test_a_divergence_that_is_no_number_is_the_worst(self) -> None:
        context, _ = oracle_context("d12", self.deviation, 2, lambda recomputed: nan if 0 in recomputed else inf)
        assert chosen(Oracle(span=2), context) == [0, 1]
        context, _ = oracle_context("d12", self.deviation, 2, lambda recomputed: nan if 0 in recomputed else 5.0)
        assert chosen(Oracle(span=2), context) == [2, 3]

    @settings(max_examples=80, deadline=None)
    @given(context=contexts(), span=st.integers(1, 4), candidates=st.integers(1, 5))
    def test_same_as_the_rule_in_loops(self, context: SelectionContext, span: int, candidates: int) -> None:
        context = for_policy(Oracle(), context)
        assert chosen(Oracle(span, candidates), context) == slow_oracle(context, span, candidates)


def slow_oracle(context: SelectionContext, length: int, candidates: int) -> list[int]:
    deviation = dict(zip(context.positions.tolist(), context.deviation.tolist(), strict=True))
    spans: list[list[int]] = []
    owner: object = None
    for position in deviation:
        segment = next(s for s in context.segments if s.start <= position < s.end)
        new = segment if segment.kind not in GAP_KINDS else "gap"
        parted = new == "gap" and bool(spans) and position != spans[-1][-1] + 1
        if new != owner or parted or len(spans[-1]) == length:
            spans.append([])
        spans[-1].append(position)
        owner = new
    spans.sort(key=lambda s: (-sum(deviation[p] for p in s) / len(s), s[0]))
    pool, rest = spans[:candidates], spans[candidates:]
    selected: list[int] = []
    while pool and len(selected) < context.k:
        cuts = [cut(span, context.k - len(selected), deviation) for span in pool]
        if sum(map(len, pool)) <= context.k - len(selected):
            selected += [p for span in pool for p in span]
            break
        best = min(range(len(pool)), key=lambda i: (context.output_kl(np.array(sorted(selected + cuts[i]))), i))
        selected += cuts[best]
        del pool[best]
    for span in rest:
        selected += cut(span, context.k - len(selected), deviation)
    return sorted(selected)


def cut(span: list[int], left: int, deviation: dict[int, float]) -> list[int]:
    windows = [span[start : start + left] for start in range(max(1, len(span) - left + 1))] if left else [[]]
    return max(windows, key=lambda window: sum(deviation[p] for p in window))
