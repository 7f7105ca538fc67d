"""Texts that recur inside messages behind other text: nothing reuses them until prompts are cut where they recur.

They are what `record import --segment auto` would find in the segments that came first, `MOST_SEARCHED` tokens of them.
A text that stands behind the same tokens of the prompt as before is left to prefix caches, and one that is a segment of
its own to chunk caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np

from kvaudit.preflight.findings import Findings, Place, place_of
from kvaudit.preflight.pieces import Piece, PiecedPrompt
from kvaudit.records import Request
from kvaudit.segmenting.grams import Runs
from kvaudit.segmenting.recurring import GRAM, runs_in_requests

SHARE_TOLD = 0.05
"""Of all prompt tokens that were looked at. What recurs less is a turn of phrase, or an instruction at the end."""
MOST_SEARCHED = 1 << 21
"""Tokens of distinct segments that are searched."""
_DIGEST = 16


@dataclass(slots=True)
class _Text:
    """A distinct segment: where it came first, behind which tokens (`before`), and the requests first and last."""

    piece: Piece
    place: Place
    before: blake2b
    first: int
    last: int


class InsideLint:
    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._texts: dict[str, _Text] = {}
        self._prompt_tokens = self._searched = 0

    def add(self, request: Request, prompt: PiecedPrompt) -> None:
        if self._searched >= MOST_SEARCHED:
            return
        before = blake2b(digest_size=_DIGEST)
        for index, piece in enumerate(prompt.pieces):
            if piece.is_chunk and piece.tokens >= GRAM:
                self._remember(request, prompt, index, before)
            before.update(piece.ids)
            self._prompt_tokens += piece.tokens

    def _remember(self, request: Request, prompt: PiecedPrompt, index: int, before: blake2b) -> None:
        piece = prompt.pieces[index]
        content = piece.content_id if piece.text is None else piece.text
        known = self._texts.get(content)
        if known is not None:
            known.last = request.ordinal
            return
        place = place_of(request.request_id, request.ordinal, prompt, index)
        self._texts[content] = _Text(piece, place, before.copy(), request.ordinal, request.ordinal)
        self._searched += piece.tokens

    def finish(self) -> None:
        texts = list(self._texts.values())
        runs, groups = runs_in_requests(
            [np.frombuffer(text.piece.ids, np.int32) for text in texts], [(text.first, text.last) for text in texts]
        )
        inside = [0] * len(texts)
        for same in groups:
            self._count(texts, runs, same, inside)
        if not any(inside) or sum(inside) < SHARE_TOLD * self._prompt_tokens:
            return
        tokens, text = next((tokens, text) for tokens, text in zip(inside, texts, strict=True) if tokens)
        what = f"{tokens:,} tokens of this {text.piece.kind} stood inside an earlier one, behind other text"
        requests = {text.first for tokens, text in zip(inside, texts, strict=True) if tokens}
        self._findings.add("recurs-inside", None, text.place, sum(inside), what, len(requests))

    def _count(self, texts: list[_Text], runs: Runs, same: list[int], inside: list[int]) -> None:
        """Add the tokens of a recurring text to those of each text that has it behind what was not before it earlier.

        `same` are the runs of it, in the order of the texts.
        """
        known: set[bytes] = set()
        for number, here in groupby(same, key=lambda run: int(runs.text[run])):
            text, found = texts[number], set()
            for start, end in ((int(runs.start[run]), int(runs.end[run])) for run in here):
                before = text.before.copy()
                before.update(text.piece.ids[:start])
                found.add(before.digest())
                is_whole = end - start == text.piece.tokens
                if known and before.digest() not in known and not is_whole:
                    inside[number] += end - start
            known |= found
