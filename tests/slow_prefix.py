"""The exact prefix caches the slow way, without a limit: every prompt that was served is kept whole and compared."""

from __future__ import annotations

from collections.abc import Sequence

from slow_model import Mixed

Kept = tuple[tuple[int, ...], Mixed]
"""A prompt that was served, and its cache."""

BLOCK = 16


def longest_prefix(lookup: str, token_ids: tuple[int, ...], kept: Sequence[Kept]) -> tuple[int, Mixed | None]:
    """How many tokens of a prompt are there already, never its last, and the cache of the first prompt with them."""
    best: tuple[int, Mixed | None] = (0, None)
    for earlier, cache in kept:
        for length in range(min(len(token_ids) - 1, len(earlier)), best[0], -1):
            whole_blocks = lookup == "sglang-prefix" or length % BLOCK == 0
            if whole_blocks and earlier[:length] == token_ids[:length]:
                best = length, cache
                break
    return best
