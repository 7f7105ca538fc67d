"""The strategy `pattern:REGEX`: what matches is a document."""

from __future__ import annotations

from collections.abc import Sequence

import regex

from kvaudit.errors import UsageError
from kvaudit.records import DOCUMENT
from kvaudit.segmenting.pieces import CutError, Piece, Prepare, cutting_texts, sound

LONGEST_SEARCH = 10.0
"""Seconds for one text. Patterns that look for longer backtrack without end."""


def pattern(argument: str) -> Prepare:
    """Every match is a document, what stands between keeps its kind. `.` matches line ends too.

    Raises UsageError for a broken pattern; the cut raises CutError where it matches no characters or takes long.
    """
    try:
        compiled = regex.compile(argument, regex.DOTALL)
    except regex.error as error:
        raise UsageError(f"the pattern {argument!r} is broken: {error}", "it is a regular expression") from error

    def cut(piece: Piece) -> Sequence[Piece]:
        try:
            spans = [match.span() for match in compiled.finditer(piece.text, timeout=LONGEST_SEARCH)]
        except TimeoutError as error:
            raise CutError(
                f"the pattern {argument!r} takes more than {LONGEST_SEARCH:.0f} s on a text of "
                f"{len(piece.text):,} characters",
                "write one that does not try the same text in many ways",
            ) from error
        if any(start == end for start, end in spans):
            raise CutError(f"the pattern {argument!r} matches the empty text", "a document has something in it")
        return tuple(_pieces(piece, spans))

    return cutting_texts(cut)


def _pieces(piece: Piece, spans: Sequence[tuple[int, int]]) -> Sequence[Piece]:
    if not spans:
        return (piece,)
    parts, position = [], 0
    for start, end in spans:
        parts += [(piece.kind, piece.text[position:start]), (DOCUMENT, piece.text[start:end])]
        position = end
    return tuple(sound([*parts, (piece.kind, piece.text[position:])]))
