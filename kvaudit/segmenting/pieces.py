"""What strategies work on: the pieces of a message, which is all of a prompt where there is no chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvaudit.errors import UsageError
from kvaudit.records import GAP_KINDS, SEPARATOR, Request


class Piece(NamedTuple):
    """A segment without its role, which only the first of a message has."""

    kind: str
    text: str
    token_ids: tuple[int, ...] | None = None


class CutError(UsageError):
    """A strategy that does not get on with a text."""


Cut = Callable[[Piece], Sequence[Piece]]
"""The pieces that one piece falls into; itself alone where it is not cut. Raises CutError."""

Rewrite = Callable[[Sequence[Piece]], Sequence[Piece]]
"""The pieces of a message in the place of those that it had. Joined, they are the same text and token ids."""


class OffsetTokenizer(Protocol):
    def offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """Token ids of a text, and for each the half-open range of its characters."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A strategy that has looked at the trace. `found` says as data what it saw, `told` in words."""

    rewrite: Rewrite
    found: Mapping[str, object] = field(default_factory=dict)
    told: str = ""


Prepare = Callable[[Sequence[Request], OffsetTokenizer], Prepared]


def cutting(cut: Cut) -> Rewrite:
    """Cut every piece that is no gap, each distinct one once."""
    known: dict[Piece, Sequence[Piece]] = {}

    def rewrite(pieces: Sequence[Piece]) -> Sequence[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            parts = known.get(piece)
            if parts is None:
                parts = known[piece] = (piece,) if piece.kind in GAP_KINDS else cut(piece)
            found += parts
        return found

    return rewrite


def cutting_texts(cut: Cut) -> Prepare:
    """A strategy that looks at one text at a time, and at none that stands for token ids."""

    def prepare(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> Prepared:
        return Prepared(cutting(lambda piece: cut(piece) if piece.text and piece.token_ids is None else (piece,)))

    return prepare


def sound(parts: Iterable[tuple[str, str]]) -> Iterator[Piece]:
    """(kind, text) as pieces: without empty ones, and white space alone is a separator."""
    for kind, text in parts:
        if text:
            yield Piece(SEPARATOR if text.isspace() else kind, text)


def token_bounds(offsets: Sequence[tuple[int, int]], length: int) -> list[int]:
    """Where each token of a text of `length` characters begins, and at last its end.

    A space between two tokens belongs to the second. Of tokens that share a character the first has it, the others are
    empty, so that a cut never falls inside a character.
    """
    bounds = [0]
    for _, end in offsets[:-1]:
        bounds.append(max(bounds[-1], end))
    return [*bounds, length] if offsets else bounds
