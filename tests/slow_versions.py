"""How well a stored version of a chunk suits a context, the slow way: each chunk and each pair of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def weights_then(then: Sequence[tuple[str, int]], attention: Mapping[str, float] | None) -> list[tuple[str, float]]:
    """Each chunk that stood before once, in the order in which they first stood there: what was looked at of it where
    that is known of all of them, else its tokens (of every time that it stood there)."""
    names: list[str] = []
    for name, _ in then:
        if name not in names:
            names.append(name)
    if attention is not None and all(name in attention for name in names):
        return [(name, attention[name]) for name in names]
    return [(name, float(sum(tokens for other, tokens in then if other == name))) for name in names]


def overlap(weights: Sequence[tuple[str, float]], now: Sequence[str]) -> float:
    if not weights:
        return 1.0
    kept = [name for name, _ in weights if name in now]
    swapped = pairs = 0
    for index, early in enumerate(kept):
        for late in kept[index + 1 :]:
            pairs += 1
            swapped += now.index(early) > now.index(late)
    share = sum(weight for name, weight in weights if name in now) / sum(weight for _, weight in weights)
    return share * (1 - swapped / pairs) if pairs else share
