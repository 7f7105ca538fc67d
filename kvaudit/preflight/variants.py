"""Segments that say the same in another form: white space, JSON key order, Unicode normalisation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from unicodedata import is_normalized, normalize

from kvaudit.preflight.findings import Findings, Place, place_of
from kvaudit.preflight.pieces import Piece, PiecedPrompt
from kvaudit.records import QUERY, Request


@dataclass(frozen=True, slots=True)
class _First:
    piece: Piece
    place: Place


class VariantLint:
    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._seen: set[Piece] = set()
        self._firsts: dict[bytes, _First] = {}

    def add(self, request: Request, prompt: PiecedPrompt) -> None:
        if self._seen.issuperset(prompt.pieces):
            return
        for index, piece in enumerate(prompt.pieces):
            if piece not in self._seen:
                self._seen.add(piece)
                if piece.text and piece.is_chunk and piece.kind != QUERY:
                    self._compare(piece, place_of(request.request_id, request.ordinal, prompt, index))

    def _compare(self, piece: Piece, place: Place) -> None:
        assert piece.text is not None
        digest = blake2b(canonical(piece.text).encode(errors="surrogatepass"), digest_size=16).digest()
        first = self._firsts.setdefault(digest, _First(piece, place))
        if first.piece.content_id == piece.content_id:
            return
        form = _difference(first.piece.text or "", piece.text)
        segment = f", segment {first.place.segment}" if first.place.segment else ""
        self._findings.add(
            "form",
            (form, piece.kind),
            place,
            piece.tokens,
            lambda: f"{piece.kind} repeats request {first.place.request_id!r}{segment}, with other {form}",
        )


def canonical(text: str) -> str:
    """The same for texts that differ in white space, in Unicode normalisation, or in the layout of one JSON value."""
    composed = text if is_normalized("NFC", text) else normalize("NFC", text)
    as_json = _sorted_json(composed)
    return " ".join(composed.split()) if as_json is None else as_json


def _sorted_json(text: str) -> str | None:
    """One JSON object or list with its keys sorted; None for any other text, and for keys that occur twice."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text, object_pairs_hook=_distinct_keys, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _difference(first: str, text: str) -> str:
    if "".join(first.split()) == "".join(text.split()):
        return "white space"
    if _sorted_json(text) is not None:
        return "JSON key order"
    return "Unicode normalisation"
