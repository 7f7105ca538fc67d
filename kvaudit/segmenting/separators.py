"""The strategy `separator:TEXT`: a text that stands between documents."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.records import DOCUMENT, INSTRUCTION, MESSAGE, QUERY, SEPARATOR
from kvaudit.segmenting.pieces import Piece, Prepare, cutting_texts, sound
from kvaudit.traces.templates import unescape


def separator(argument: str) -> Prepare:
    r"""Every occurrence of the text (with `\n`, `\t`, `\r`, `\\`) is a separator, and what it divides are documents.

    An instruction keeps its kind in the first of them, a query or message in the last, where the question stands.
    """
    between = unescape(argument)

    def cut(piece: Piece) -> Sequence[Piece]:
        texts = piece.text.split(between)
        if len(texts) == 1:
            return (piece,)
        kinds = _kinds(piece.kind, texts)
        parts = [(kinds[0], texts[0])]
        for kind, text in zip(kinds[1:], texts[1:], strict=True):
            parts += [(SEPARATOR, between), (kind, text)]
        return tuple(sound(parts))

    return cutting_texts(cut)


def _kinds(kind: str, texts: Sequence[str]) -> list[str]:
    kinds = [DOCUMENT] * len(texts)
    filled = [at for at, text in enumerate(texts) if text.strip()]
    if filled and kind in (INSTRUCTION, QUERY, MESSAGE):
        kinds[filled[0] if kind == INSTRUCTION else filled[-1]] = kind
    return kinds
