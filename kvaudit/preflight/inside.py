"""Texts that recur inside messages at other places: no chunk finds them until prompts are cut where they recur.

A sample of the k-grams of every distinct segment is remembered, chosen by their hashes, so that the same text has the
same sample wherever it stands. Where the sample grows too large, half of it is forgotten, and every later one is half.
What is counted is a lower bound: the tokens of the sampled k-grams that an earlier segment had at another place.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvaudit.preflight.findings import Findings, Place, place_of
from kvaudit.preflight.pieces import Piece, PiecedPrompt
from kvaudit.records import Request
from kvaudit.segmenting.grams import gram_hashes
from kvaudit.segmenting.recurring import GRAM

SHARE_TOLD = 0.05
"""Of all prompt tokens. What recurs less is a turn of phrase, or an instruction at the end."""
MOST_REMEMBERED = 1 << 18
_ONE_IN = 8
"""So many k-grams at first stand for one that is remembered: a text of 100 tokens has eight or nine."""


class InsideLint:
    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._seen: set[Piece] = set()
        self._first_places: dict[int, int] = {}
        self._below = (1 << 64) // _ONE_IN
        self._tokens = self._requests = 0
        self._first: tuple[Place, str] | None = None

    def add(self, request: Request, prompt: PiecedPrompt) -> None:
        if self._seen.issuperset(prompt.pieces):
            return
        inside = 0
        for index, piece in enumerate(prompt.pieces):
            if piece in self._seen:
                continue
            self._seen.add(piece)
            tokens = self._elsewhere(piece) if piece.is_chunk and piece.tokens >= GRAM else 0
            inside += tokens
            if tokens and self._first is None:
                what = f"{tokens:,} tokens or more of this {piece.kind} stood inside an earlier one, at another place"
                self._first = place_of(request.request_id, request.ordinal, prompt, index), what
        self._tokens += inside
        self._requests += bool(inside)

    def finish(self, prompt_tokens: int) -> None:
        if self._first is not None and self._tokens >= SHARE_TOLD * prompt_tokens:
            place, what = self._first
            self._findings.add("recurs-inside", None, place, self._tokens, what, self._requests)

    def _elsewhere(self, piece: Piece) -> int:
        """How many of its tokens earlier segments had, at least, at another place; remembers its own."""
        hashes = gram_hashes(np.frombuffer(piece.ids, np.int32), GRAM)
        places = np.flatnonzero(hashes < np.uint64(self._below))
        sample = list(zip(hashes[places].tolist(), places.tolist(), strict=True))
        known = self._first_places
        tokens = _covered(place for name, place in sample if known.get(name, place) != place)
        for name, place in sample:
            known.setdefault(name, place)
        while len(known) > MOST_REMEMBERED:
            self._below //= 2
            known = self._first_places = {name: place for name, place in known.items() if name < self._below}
        return tokens


def _covered(places: Iterable[int]) -> int:
    """Tokens in the k-grams that begin at these places, in their order."""
    covered = end = 0
    for place in places:
        covered += place + GRAM - max(end, place)
        end = place + GRAM
    return covered
