"""A request's prompts as pieces: one object for each distinct segment, however often it recurs."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvaudit.prompts import Piece as ReadPiece
from kvaudit.prompts import Prompts
from kvaudit.records import GAP_KINDS, Request, Segment

_content_id = attrgetter("content_id")
_ids = attrgetter("ids")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of a prompt's tokens. Two pieces with the same `ids` have the same `content_id`.

    `text` is what was tokenised, None where the trace carries the ids. `is_chunk`: whether it can be a cache entry;
    separators and template glue cannot.
    """

    kind: str
    content_id: str
    ids: array[int]
    tokens: int
    text: str | None
    is_chunk: bool


@dataclass(frozen=True, slots=True)
class PiecedPrompt:
    """`segments` gives, for each piece, the index of the trace's segment; None for template glue."""

    pieces: Sequence[Piece]
    segments: Sequence[int | None]

    @property
    def ids(self) -> bytes:
        """The token ids as 32-bit integers in the machine's order."""
        return b"".join(map(_ids, self.pieces))


class PieceReader:
    """Prompts of a trace as pieces. Raises what `Prompts` raises for a request that cannot become token ids."""

    def __init__(self, prompts: Prompts, has_leading_ids: bool) -> None:
        self._prompts = prompts
        self._leads = has_leading_ids
        self._known: dict[str, Piece] = {}
        self._firsts: dict[str, Piece] = {}
        self._distinct: dict[tuple[str, str, str | None], Piece] = {}

    def request(self, request: Request) -> PiecedPrompt:
        return self._prompt(request, request.segments)

    def prelude(self, request: Request) -> Iterator[PiecedPrompt]:
        for segments in request.prelude:
            yield self._prompt(request, segments)

    def _prompt(self, request: Request, segments: Sequence[Segment]) -> PiecedPrompt:
        if request.chat:
            return self._read(request, segments)
        known = self._found(segments)
        if known is None:
            self._learn(request, segments)
            known = self._found(segments)
        return known or self._read(request, segments)

    def _found(self, segments: Sequence[Segment]) -> PiecedPrompt | None:
        """The prompt where all its pieces are known."""
        try:
            pieces = list(map(self._known.__getitem__, map(_content_id, segments)))
            if self._leads:
                pieces[0] = self._firsts[segments[0].content_id]
        except KeyError:
            return None
        return PiecedPrompt(pieces, range(len(pieces)))

    def _learn(self, request: Request, segments: Sequence[Segment]) -> None:
        """Know every segment that has tokens of its own; `_read` tells gaps without any from faults."""
        for index, segment in enumerate(segments):
            if segment.content_id not in self._known:
                self._keep(self._known, segment, self._prompts.piece(request, index, segment, leading=False))
        first = segments[0]
        if self._leads and first.content_id not in self._firsts:
            self._keep(self._firsts, first, self._prompts.piece(request, 0, first, leading=True))

    def _keep(self, known: dict[str, Piece], segment: Segment, piece: ReadPiece | None) -> None:
        if piece is not None:
            known[segment.content_id] = self._interned(piece)

    def _read(self, request: Request, segments: Sequence[Segment]) -> PiecedPrompt:
        read = self._prompts.pieces(request, segments)
        return PiecedPrompt(list(map(self._interned, read)), [piece.segment for piece in read])

    def _interned(self, piece: ReadPiece) -> Piece:
        key = (piece.kind, piece.content_id, piece.text)
        known = self._distinct.get(key)
        if known is None:
            chunk = piece.kind not in GAP_KINDS
            known = Piece(piece.kind, piece.content_id, piece.ids, len(piece.ids), piece.text, chunk)
            self._distinct[key] = known
        return known
