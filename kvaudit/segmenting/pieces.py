"""What strategies work on: the pieces of a message, which is all of a prompt where there is no chat."""

from __future__ import annotations

from collections import Counter
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

Rewrite = Callable[[Sequence[Piece], str | None], Sequence[Piece]]
"""The pieces of a message in the place of those that it had, from these and the message's role, None where there is no
chat. Joined, they are the same text and token ids.
"""


class OffsetTokenizer(Protocol):
    def offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """Token ids of a text, and for each the half-open range of its characters."""
        ...


@dataclass(slots=True)
class Looked:
    """Where a strategy looked: distinct texts by kind, in how many of them it found what it cuts at, and how many it
    left out since they stand for token ids.
    """

    texts: Counter[str] = field(default_factory=Counter)
    characters: int = 0
    matching: int = 0
    left_out: int = 0

    def at(self, piece: Piece, *, matches: bool) -> None:
        if piece.token_ids is not None:
            self.left_out += 1
            return
        self.texts[piece.kind] += 1
        self.characters += len(piece.text)
        self.matching += matches

    def sentence(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.texts.items()))
        count = self.texts.total()
        left = f", {self.left_out:,} with token ids left out" if self.left_out else ""
        looked = f"{count:,} distinct text{'' if count == 1 else 's'} looked at{left}"
        return f"{looked} ({kinds}; {self.characters:,} characters)" if kinds else looked


@dataclass(frozen=True, slots=True)
class Prepared:
    """A strategy that has looked at the trace. `found` says as data what it saw, `told` in words.

    `looked` is filled while it rewrites; None for a strategy that does not look for anything in texts.
    """

    rewrite: Rewrite
    found: Mapping[str, object] = field(default_factory=dict)
    told: str = ""
    looked: Looked | None = None


Prepare = Callable[[Sequence[Request], OffsetTokenizer], Prepared]


def cutting(cut: Cut, looked: Looked | None = None) -> Rewrite:
    """Cut every piece that is no gap, each distinct one once; `looked` counts these."""
    known: dict[Piece, Sequence[Piece]] = {}

    def rewrite(pieces: Sequence[Piece], role: str | None) -> Sequence[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            parts = known.get(piece)
            if parts is None:
                parts = known[piece] = (piece,) if piece.kind in GAP_KINDS else cut(piece)
                if looked and piece.kind not in GAP_KINDS:
                    looked.at(piece, matches=parts[0] is not piece)
            found += parts
        return found

    return rewrite


def cutting_texts(cut: Cut) -> Prepare:
    """A strategy that looks at one text at a time, and at none that stands for token ids."""

    def prepare(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> Prepared:
        looked = Looked()
        rewrite = cutting(lambda piece: cut(piece) if piece.text and piece.token_ids is None else (piece,), looked)
        return Prepared(rewrite, looked=looked)

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
