"""CacheClip: windows by the auxiliary model's attention, the shared prefix kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from policy_contexts import context_of, contexts, for_policy

from kvaudit.policies import SelectionContext, checked_selection
from kvaudit.policies.cacheclip import CacheClip
from kvaudit.records import GAP_KINDS

# Instruction at 0-1, documents at 2-6 and 7-10: windows of two are 2-3, 4-5, 6, 7-8, 9-10. Means over the heads are
# in eighths: 9 9 | 1 3 | 2 4 | 5 | 6 0 | 1 1, so windows rank 6 (5), then 4-5 and 7-8 (3 each), 2-3 (2), 9-10 (1).
HEADS = np.array(
    [
        [18, 18, 0, 6, 4, 4, 5, 12, 0, 2, 0],
        [0, 0, 2, 0, 0, 4, 5, 0, 0, 0, 2],
    ],
    dtype=np.float32,
)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (0, []),
        (1, [6]),
        # The window 4-5 does not fit into what is left: the best of the other tokens, which is 7.
        (2, [6, 7]),
        (3, [4, 5, 6]),
        (5, [4, 5, 6, 7, 8]),
        (8, [2, 3, 4, 5, 6, 7, 8, 9]),
        # Only now the instruction.
        (9, [2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (10, [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (11, list(range(11))),
    ],
)
def test_whole_windows_then_the_best_tokens_then_the_shared_prefix(k: int, expected: list[int]) -> None:
    context = context_of("i2 d5 d4", [0.0] * 11, k, needs=CacheClip.needs, auxiliary=HEADS)
    assert checked_selection(CacheClip(group=2), context).tolist() == expected


def test_what_stands_before_the_first_chunk_is_shared_too() -> None:
    attention = np.array([[9, 9, 9, 1, 2]], dtype=np.float32)
    context = context_of("s1 i2 d2", [0.0] * 5, 2, needs=CacheClip.needs, auxiliary=attention)
    assert checked_selection(CacheClip(), context).tolist() == [3, 4]


def test_without_any_chunk_everything_competes() -> None:
    attention = np.array([[1, 9, 2, 2]], dtype=np.float32)
    context = context_of("s2 g2", [0.0] * 4, 1, needs=CacheClip.needs, auxiliary=attention)
    assert checked_selection(CacheClip(), context).tolist() == [1]


def test_windows_that_are_equal_over_three_heads_are_not_parted_by_rounding() -> None:
    """Both windows have a mean of 2.125 over heads, so that the first is ranked first and does not fit. Of thirds,
    which are no binary numbers, the second would have more."""
    attention = np.array([[0, 0, 2.625, 1.625, 2.125], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=np.float32)
    context = context_of("d2 d3", [0.0] * 5, 1, needs=CacheClip.needs, auxiliary=attention)
    assert checked_selection(CacheClip(group=2), context).tolist() == [2]


def slow_cacheclip(context: SelectionContext, group: int) -> list[int]:
    positions = context.positions.tolist()
    attention = dict(zip(positions, context.auxiliary_attention().sum(axis=0).tolist(), strict=True))
    chunks = [segment for segment in context.segments if segment.kind not in GAP_KINDS]
    kept = [p for p in positions if chunks and p < chunks[0].end]
    windows: list[list[int]] = []
    owner = None
    for position in positions:
        segment = next(s for s in context.segments if s.start <= position < s.end)
        new = segment if segment.kind not in GAP_KINDS else "gap"
        parted = new == "gap" and bool(windows) and position != windows[-1][-1] + 1
        if new != owner or parted or len(windows[-1]) == group:
            windows.append([])
        windows[-1].append(position)
        owner = new
    windows = [window for window in windows if window[0] not in kept]
    windows.sort(key=lambda window: (-sum(attention[p] for p in window) / len(window), window[0]))
    selected: list[int] = []
    for window in windows:
        if len(selected) + len(window) > context.k:
            break
        selected += window
    others = [p for p in positions if p not in kept and p not in selected]
    for some in (others, kept):
        ranked = sorted(some, key=lambda p: (-attention[p], p))
        selected += ranked[: context.k - len(selected)]
    return sorted(selected)


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@settings(max_examples=80, deadline=None)
@given(context=contexts())
def test_same_as_the_rule_in_loops(group: int, context: SelectionContext) -> None:
    context = for_policy(CacheClip(), context)
    assert checked_selection(CacheClip(group), context).tolist() == slow_cacheclip(context, group)
