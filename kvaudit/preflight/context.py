"""Segments that tokenise otherwise between their neighbours than alone (LMCache 3228 and 2026).

Every pair of neighbours is tokenised as one text, once, and held against the ids of its two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvaudit.preflight.findings import Findings, place_of
from kvaudit.preflight.pieces import Piece, PiecedPrompt
from kvaudit.records import Request

MOST_PAIRS = 200_000
"""Distinct pairs of neighbours that are tokenised, so that memory is bounded."""

Encode = Callable[[str], Sequence[int]]
Pair = tuple[Piece, Piece]


@dataclass(frozen=True, slots=True)
class Border:
    """How two texts tokenise together: whether the end of the left and the start of the right become other tokens."""

    left_changed: bool
    right_changed: bool
    alone: int
    together: int


def border(encode: Encode, left: str, right: str) -> Border | None:
    """None where the tokens together are those of the two texts alone."""
    left_ids, right_ids, together = list(encode(left)), list(encode(right)), list(encode(left + right))
    alone = left_ids + right_ids
    if together == alone:
        return None
    shorter = min(len(alone), len(together))
    same = next((i for i in range(shorter) if alone[i] != together[i]), shorter)
    same_end = next((i for i in range(shorter) if alone[-1 - i] != together[-1 - i]), shorter)
    return Border(same < len(left_ids), same_end < len(right_ids), len(alone), len(together))


class ContextLint:
    def __init__(self, encode: Encode, findings: Findings) -> None:
        self._encode, self._findings = encode, findings
        self._seen: set[Pair] = set()
        self._changed: dict[Pair, Border] = {}
        self.unchecked = 0

    def add(self, request: Request, prompt: PiecedPrompt) -> None:
        pairs = set(zip(prompt.pieces, prompt.pieces[1:], strict=False))
        for pair in sorted(pairs - self._seen, key=_by_content) if not pairs <= self._seen else ():
            self._check(pair)
        if not self._changed.keys().isdisjoint(pairs):
            self._report(request, prompt)

    def _check(self, pair: Pair) -> None:
        if len(self._seen) >= MOST_PAIRS:
            self.unchecked += 1
            return
        self._seen.add(pair)
        left, right = pair
        if left.text and right.text:
            found = border(self._encode, left.text, right.text)
            if found is not None:
                self._changed[pair] = found

    def _report(self, request: Request, prompt: PiecedPrompt) -> None:
        sides: dict[int, list[tuple[str, Border]]] = {}
        for index, pair in enumerate(zip(prompt.pieces, prompt.pieces[1:], strict=False)):
            found = self._changed.get(pair)
            if found is not None and found.left_changed:
                sides.setdefault(index, []).append(("end", found))
            if found is not None and found.right_changed:
                sides.setdefault(index + 1, []).append(("start", found))
        for index, changes in sides.items():
            self._add(request, prompt, index, changes)

    def _add(self, request: Request, prompt: PiecedPrompt, index: int, changes: Sequence[tuple[str, Border]]) -> None:
        piece = prompt.pieces[index]
        where = " and ".join(sorted((side for side, _ in changes), reverse=True))
        code = "context" if piece.is_chunk else "separator-context"
        following = next((other.tokens for other in prompt.pieces[index + 1 :] if other.is_chunk), 0)
        found = changes[0][1]
        self._findings.add(
            code,
            (piece.kind, where),
            place_of(request.request_id, request.ordinal, prompt, index),
            piece.tokens if piece.is_chunk else following,
            lambda: (
                f"{piece.kind} becomes other tokens at its {where}: tokenised with its neighbour, the two are "
                f"{found.together:,} tokens, each alone {found.alone:,}"
            ),
        )


def _by_content(pair: Pair) -> tuple[str, str]:
    return pair[0].content_id, pair[1].content_id
