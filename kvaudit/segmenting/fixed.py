"""The strategy `tokens:N`: segments of a fixed size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from kvaudit.errors import UsageError
from kvaudit.records import Request
from kvaudit.segmenting.pieces import OffsetTokenizer, Piece, Prepare, Prepared, cutting, token_bounds


def tokens(argument: str) -> Prepare:
    """N tokens a segment, as the whole text is tokenised, each of its text's kind; the rest is one of its own.

    So texts that begin alike share their segments. Between tokens that share a character there is no cut: the segment
    is longer. A text with token ids that are not the tokenizer's is left as it is.
    """
    if not (argument.isascii() and argument.isdecimal() and 0 < len(argument) < 10 and int(argument)):
        raise UsageError(f"'tokens:{argument}' has no number of tokens", "write, for instance, tokens:256")
    size = int(argument)

    def prepare(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> Prepared:
        return Prepared(cutting(lambda piece: _cut(piece, size, tokenizer)))

    return prepare


def _cut(piece: Piece, size: int, tokenizer: OffsetTokenizer) -> Sequence[Piece]:
    ids = piece.token_ids
    if not piece.text:
        return [piece._replace(token_ids=ids[at : at + size]) for at in range(0, len(ids), size)] if ids else (piece,)
    read, offsets = tokenizer.offsets(piece.text)
    if len(read) <= size or (ids is not None and tuple(read) != ids):
        return (piece,)
    bounds = token_bounds(offsets, len(piece.text))
    cuts = [0, *_cuts(bounds, size), len(read)]
    return [
        Piece(piece.kind, piece.text[bounds[start] : bounds[end]], None if ids is None else ids[start:end])
        for start, end in pairwise(cuts)
    ]


def _cuts(bounds: Sequence[int], size: int) -> Iterator[int]:
    """Tokens before which there is a cut, each where a character begins."""
    last, at = len(bounds) - 1, size
    while at < last:
        while at < last and bounds[at] == bounds[at + 1]:
            at += 1
        if at < last:
            yield at
        at += size
