"""Cache-Craft: shares by what a chunk lost, tokens by how much they looked outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, nan

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from policy_contexts import FixedSignals, context_of

from kvaudit.policies import ChunkAttention, SegmentView, SelectionContext, Written, WrittenAttention, checked_selection
from kvaudit.policies.cache_craft import CacheCraft


@dataclass(frozen=True)
class Saved:
    """What was saved of a chunk: how many tokens stood before it, what it looked at, the order of those before."""

    before: int
    inside: float
    over: Mapping[str, float]
    order: Sequence[str] | None = None

    def written(self) -> Written:
        return Written("r0", "request", 0, self.before, "then", "now", tuple(self.order or self.over))


def crafted(layout: str, saved: Sequence[Saved | None], outside: Sequence[float], k: int) -> SelectionContext:
    """Content ids are the layout's own words."""
    context = context_of(layout, [0.0] * len(outside), k, needs=CacheCraft.needs)
    segments = [
        replace(segment, hit=s is not None, written=s and s.written())
        for segment, s in zip(context.segments, saved, strict=True)
    ]
    chunks = tuple(s and ChunkAttention(s.inside, s.over) for s in saved)
    attention = WrittenAttention(np.array(outside, dtype=np.float32), chunks)
    signals = FixedSignals(np.zeros(len(outside), dtype=np.float32), written=attention)
    return replace(context, segments=segments, signals=signals)


def chosen(layout: str, saved: Sequence[Saved | None], outside: Sequence[float], k: int) -> list[int]:
    return checked_selection(CacheCraft(), crafted(layout, saved, outside, k)).tolist()


class TestByHand:
    """Instruction i2 (nothing before it), documents d4 at 2-5 and d5 at 6-10.

    d4 was written behind i2 and d9, 11 tokens, and gave 1 to i2, 2 to d9, 1 to itself. Two chunks before: a = 2 * 3 /
    (4 * 11) = 3 / 22, b = 1 / 16, impact = 1 / (1 + exp(-24 / 11)) = 0.8986. Of what it gave away 1 / 3 went to what
    still stands before it: overhead 0.8986 * 2 / 3 = 0.599, times 4 tokens 2.396.
    d5 was written behind d4 and i2, in that order, 6 tokens, and gave 1.5 to each and 2 to itself. a = 2 * 3 / (5 * 6)
    = 0.2, b = 2 / 25, impact = 1 / (1 + exp(-2.5)) = 0.9241. All of it stands before it, but of one pair one is
    swapped: distance 1, overlap 0, overhead 0.9241, times 5 tokens 4.621.
    """

    layout = "i2 d4 d5"
    saved = (
        Saved(0, 2, {}),
        Saved(11, 1, {"i2": 1, "d9": 2}),
        Saved(6, 2, {"d4": 1.5, "i2": 1.5}),
    )
    outside = (0, 0, 0.9, 0.1, 0.2, 0.9, 0.1, 0.5, 0.4, 0.3, 0.2)

    @pytest.mark.parametrize(
        ("k", "expected"),
        [
            # 0.34 and 0.66 of one token.
            (1, [7]),
            # 1.02 and 1.98: one and two.
            (3, [2, 7, 8]),
            # 2.05 and 3.95: two and four.
            (6, [2, 5, 7, 8, 9, 10]),
            # 2.73 and 5.27, but d5 has five: three and five.
            (8, [2, 4, 5, 6, 7, 8, 9, 10]),
            # The instruction lost nothing and comes after both.
            (10, [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ],
    )
    def test_shares_are_in_proportion_to_overhead_times_tokens(self, k: int, expected: list[int]) -> None:
        assert 1 / (1 + exp(-24 / 11)) * 2 / 3 * 4 == pytest.approx(2.396, abs=1e-3)
        assert 1 / (1 + exp(-2.5)) * 5 == pytest.approx(4.621, abs=1e-3)
        assert chosen(self.layout, self.saved, self.outside, k) == expected


def test_the_impact_of_the_context_weighs_what_was_lost() -> None:
    """d40 gave 20 to a chunk of 40 tokens and 20 to itself: a = b = 20 / 1600, impact 1 / (1 + 1 / e) = 0.7311.
    d50 gave 20 to each of two chunks, of 100 tokens together, and 10 to itself: a = 2 * 40 / (50 * 100) = 0.016,
    b = 10 / 2500 = 0.004, impact 1 / (1 + exp(-4)) = 0.9820. Both lost all of it: 29.24 to 49.10, of 39 tokens 14.56
    and 24.44.
    """
    saved = (Saved(40, 20, {"d8": 20}), Saved(100, 10, {"d8": 20, "d9": 20}))
    selected = chosen("d40 d50", saved, [0.0] * 90, 39)
    assert selected == [*range(15), *range(40, 64)]


def test_the_same_context_leaves_nothing_to_fix() -> None:
    saved = (Saved(0, 2, {}), Saved(2, 1, {"i2": 3}), Saved(6, 2, {"i2": 1.5, "d9": 1.5}))
    outside = [0, 0, 9, 9, 9, 9, 1, 1, 1, 2]
    assert chosen("i2 d4 d4", saved, outside, 4) == [6, 7, 8, 9], "all to the chunk that lost a neighbour"


def test_where_nothing_was_lost_shares_are_in_proportion_to_tokens() -> None:
    saved = (Saved(0, 2, {}), Saved(0, 4, {}), Saved(0, 6, {}))
    outside = [0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1, 1]
    assert chosen("i2 d4 d6", saved, outside, 6) == [0, 2, 5, 8, 10, 11]


def test_what_was_not_saved_comes_last() -> None:
    outside = [nan, 0.1, 0.2, nan, 0, 0]
    saved = (None, Saved(9, 1, {"d9": 1}), None, Saved(0, 2, {}))
    assert chosen("s1 d2 s1 d2", saved, outside, 2) == [1, 2]
    assert chosen("s1 d2 s1 d2", saved, outside, 4) == [1, 2, 4, 5]
    assert chosen("s1 d2 s1 d2", saved, outside, 5) == [0, 1, 2, 4, 5]


def test_a_chunk_that_did_not_look_at_itself_is_all_context() -> None:
    saved = (Saved(0, 2, {}), Saved(3, 0, {"d9": 4}), Saved(3, 4, {"d9": 0.001}))
    # Impacts 1 and just above 1 / 2, four tokens each: two to one.
    assert chosen("i2 d4 d4", saved, [0, 0, 1, 2, 3, 4, 1, 2, 3, 4], 3) == [4, 5, 9]


LOST = Saved(9, 1, {"d9": 1})
"""What has everything to fix: the chunk beside it has nothing, where all tokens go to this one."""


def test_a_chunk_that_stands_before_twice_counts_where_it_stands_first() -> None:
    saved = (None, None, None, Saved(5, 1, {"d2": 1, "d3": 1}), LOST)
    assert chosen("d2 d3 d2 d4 d5", saved, [1.0] * 16, 5) == [11, 12, 13, 14, 15]


def test_attention_to_what_was_no_chunk_counts_for_nothing() -> None:
    saved = (None, Saved(3, 1, {"s9": 3, "d2": 1}, order=("d2",)), LOST)
    assert chosen("d2 d4 d5", saved, [1.0] * 11, 5) == [6, 7, 8, 9, 10]


def test_a_chunk_of_which_no_attention_was_saved_counts_for_nothing() -> None:
    saved = (None, Saved(9, 1, {"d2": 1}, order=("d7", "d2")), LOST)
    assert chosen("d2 d4 d5", saved, [1.0] * 11, 5) == [6, 7, 8, 9, 10]


def slow_overheads(context: SelectionContext) -> list[float]:
    """The paper's equations over matrices of attention, chunk by chunk, all chunks before one equally long."""
    attention, overheads = context.written_attention(), []
    for i, (segment, chunk) in enumerate(zip(context.segments, attention.chunks, strict=True)):
        if chunk is None or segment.written is None:
            overheads.append(0.0)
            continue
        own, then = segment.end - segment.start, list(segment.written.over)
        length = segment.written.position / max(1, len(then))
        a = sum(chunk.over[other] / (own * length) for other in then)
        b = chunk.inside / (own * own)
        impact = 1 / (1 + exp(-a / b)) if b else 1.0
        now = [other.content_id for other in context.segments[:i]]
        kept = [other for other in then if other in now]
        total = sum(chunk.over.values())
        beta = sum(chunk.over[other] for other in kept) / total if total else 1.0
        pairs = len(kept) * (len(kept) - 1) / 2
        swaps = _swaps(kept, sorted(kept, key=now.index))
        overheads.append(impact * (1 - beta * (1 - (swaps / pairs if pairs else 0.0))))
    return overheads


def _swaps(order: list[str], target: list[str]) -> int:
    """How many exchanges of neighbours make one order into the other: a bubble sort's."""
    order, swaps = list(order), 0
    for _ in order:
        for i in range(len(order) - 1):
            if target.index(order[i]) > target.index(order[i + 1]):
                order[i], order[i + 1] = order[i + 1], order[i]
                swaps += 1
    return swaps


@st.composite
def saved_contexts(draw: st.DrawFn) -> SelectionContext:
    lengths = draw(st.lists(st.integers(10, 40), min_size=1, max_size=5, unique=True))
    words = [f"d{length}" for length in lengths]
    saved: list[Saved | None] = []
    for _ in words:
        then = draw(st.permutations([*words, "d8", "d9"]))[: draw(st.integers(0, 4))]
        over = {word: draw(st.integers(1, 8)) / 8 for word in then}
        before = sum(int(word[1:]) for word in then)
        saved.append(draw(st.just(Saved(before, draw(st.integers(0, 8)) / 4, over)) | st.none()))
    tokens = sum(lengths)
    outside = np.random.default_rng(draw(st.integers(0, 2**16))).integers(0, 9, tokens) / 8
    return crafted(" ".join(words), saved, outside, draw(st.integers(0, tokens)))


@settings(max_examples=150, deadline=None)
@given(context=saved_contexts())
def test_shares_follow_the_equations(context: SelectionContext) -> None:
    overheads = slow_overheads(context)
    lengths = [segment.end - segment.start for segment in context.segments]
    weights = [overhead * length for overhead, length in zip(overheads, lengths, strict=True)]
    selected = checked_selection(CacheCraft(), context).tolist()
    shares = [sum(s.start <= p < s.end for p in selected) for s in context.segments]
    needy = [i for i, weight in enumerate(weights) if weight > 1e-12]
    assume(all(weight == 0 or weight > 1e-12 for weight in weights))
    if context.k <= sum(lengths[i] for i in needy):
        assert sum(shares[i] for i in needy) == context.k
        for i in needy:
            exact = context.k * weights[i] / sum(weights)
            assert shares[i] == lengths[i] or shares[i] > exact - 1, "at least its share, rounded down"
            if all(shares[j] < lengths[j] for j in needy):
                assert abs(shares[i] - exact) < 1
    outside = context.written_attention().outside
    for segment in context.segments:
        inside = range(segment.start, segment.end)
        ranked = sorted(inside, key=lambda p: (-outside[p], p))
        taken = [p for p in selected if p in inside]
        assert taken == sorted(ranked[: len(taken)])


def test_a_segment_without_provenance_counts_as_unchanged() -> None:
    context = crafted("d2 d2", (Saved(3, 1, {"d9": 1}), Saved(3, 1, {"d9": 1})), [1, 1, 1, 1], 2)
    first: SegmentView = replace(context.segments[0], written=None)
    context = replace(context, segments=[first, context.segments[1]])
    assert checked_selection(CacheCraft(), context).tolist() == [2, 3]
