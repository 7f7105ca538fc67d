"""What two sequences share at their start and at their end, without looking at one element after the other."""

from __future__ import annotations

from collections.abc import Sequence


def common_start(left: Sequence[object], right: Sequence[object]) -> int:
    """Elements that both begin with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(left: Sequence[object], right: Sequence[object]) -> int:
    """Elements that both end with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[len(left) - middle : len(left) - low] == right[len(right) - middle : len(right) - low]:
            low = middle
        else:
            high = middle - 1
    return low
