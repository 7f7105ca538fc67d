"""Strategies that go by messages and the parts of their contents: by message, by part, by tool result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from kvaudit.records import DOCUMENT, GAP_KINDS, MESSAGE, QUERY, TOOL_RESULT, Request
from kvaudit.segmenting.pieces import OffsetTokenizer, Piece, Prepare, Prepared, Rewrite

_USER = "user"


def message() -> Prepare:
    """A message, or a prompt without chat, is one segment. What stands for token ids is left as it is."""
    return _looking_at_nothing(by_message)


def by_message(pieces: Sequence[Piece], role: str | None) -> Sequence[Piece]:
    return _joined(pieces, _has_text)


def part() -> Prepare:
    """Every part of a content stays the segment as which it was read.

    Of what a user sends in several parts, the last is what is asked, with the kind that the message has (query, or
    message in earlier turns), and those before it are documents. What was cut before is left as it is.
    """
    return _looking_at_nothing(_documents_first)


def _documents_first(pieces: Sequence[Piece], role: str | None) -> Sequence[Piece]:
    filled = [at for at, piece in enumerate(pieces) if piece.kind not in GAP_KINDS]
    kinds = {pieces[at].kind for at in filled}
    if role != _USER or len(filled) < 2 or kinds not in ({QUERY}, {MESSAGE}):
        return pieces
    documents = frozenset(filled[:-1])
    return [piece._replace(kind=DOCUMENT) if at in documents else piece for at, piece in enumerate(pieces)]


def tool_result() -> Prepare:
    """Each part of a tool's result stays a segment; what else is in a message is joined."""
    return _looking_at_nothing(lambda pieces, role: _joined(pieces, _is_no_result))


def _looking_at_nothing(rewrite: Rewrite) -> Prepare:
    def prepare(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> Prepared:
        return Prepared(rewrite)

    return prepare


def _has_text(piece: Piece) -> bool:
    return piece.token_ids is None


def _is_no_result(piece: Piece) -> bool:
    return _has_text(piece) and piece.kind != TOOL_RESULT


def _joined(pieces: Sequence[Piece], joins: Callable[[Piece], bool]) -> list[Piece]:
    """Every run of neighbours that `joins` holds for as one piece."""
    whole: list[Piece] = []
    for together, run in groupby(pieces, joins):
        neighbours = list(run)
        whole += [_one(neighbours)] if together else neighbours
    return whole


def _one(pieces: Sequence[Piece]) -> Piece:
    """What asks makes a query of the whole, else the first kind that was not cut out of a text decides."""
    if len(pieces) == 1:
        return pieces[0]
    kinds = [piece.kind for piece in pieces]
    own = [kind for kind in kinds if kind not in GAP_KINDS and kind != DOCUMENT]
    kind = QUERY if QUERY in own else (own or [kind for kind in kinds if kind not in GAP_KINDS] or kinds)[0]
    return Piece(kind, "".join(piece.text for piece in pieces))
