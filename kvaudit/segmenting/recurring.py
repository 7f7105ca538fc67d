"""The strategy `auto`: texts that recur inside different messages, found by their token ids wherever they stand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median

import numpy as np
import numpy.typing as npt

from kvaudit.records import DOCUMENT, GAP_KINDS, Request
from kvaudit.segmenting.borders import Place, settle
from kvaudit.segmenting.grams import Runs, recurring_runs
from kvaudit.segmenting.pieces import OffsetTokenizer, Piece, Prepare, Prepared, cutting, sound, token_bounds

GRAM = 32
"""Tokens in a row that have to recur. Longer than what is said twice by chance, and than most turns of phrase."""
FEWEST_TOKENS = 16
"""What has to be left of a recurring text where its ends belong to its neighbours as well."""

_Content = tuple[str, tuple[int, ...] | None]
_Range = tuple[int, int]


def recurring() -> Prepare:
    """What recurs in two or more messages (prompts, where there is no chat) of two or more requests is a document.

    The rest keeps its kind, and what recurs as a whole stays as it is. What several documents share, `GRAM` tokens or
    more of it, recurs more often than each of them and is cut out of them. Texts with token ids are cut by these where
    they have no text, and left as they are otherwise.
    """

    def prepare(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> Prepared:
        found = _find(requests, tokenizer)
        return Prepared(cutting(lambda piece: _cut(piece, found.ranges)), found.as_data(), found.sentence())

    return prepare


def _cut(piece: Piece, ranges: dict[_Content, list[_Range]]) -> Sequence[Piece]:
    inside = ranges.get((piece.text, piece.token_ids))
    if not inside:
        return (piece,)
    length = len(piece.text) if piece.token_ids is None else len(piece.token_ids)
    if inside == [(0, length)]:
        return (piece,)
    parts, position = [], 0
    for start, end in [*inside, (length, length)]:
        parts += [(piece.kind, position, start), (DOCUMENT, start, end)]
        position = end
    if piece.token_ids is None:
        return tuple(sound((kind, piece.text[start:end]) for kind, start, end in parts))
    return tuple(Piece(kind, "", piece.token_ids[start:end]) for kind, start, end in parts if start < end)


@dataclass(slots=True)
class _Text:
    """A distinct text. `bounds` are the characters at which its tokens begin and the last ends; None for token ids."""

    content: _Content
    ids: npt.NDArray[np.int32]
    bounds: npt.NDArray[np.int32] | None
    requests: list[int] = field(default_factory=list)
    occurrences: int = 0
    is_searched: bool = False


@dataclass(slots=True)
class _Found:
    """What recurs: in how many requests and with how many tokens, for each; the ranges of it in every text."""

    ranges: dict[_Content, list[_Range]] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    recurring_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def _share(self) -> float:
        return self.recurring_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_data(self) -> dict[str, object]:
        data: dict[str, object] = {"recurring_texts": len(self.tokens), "prompt_tokens": self.prompt_tokens}
        if self.tokens:
            data["recurring_in_requests"] = [min(self.requests), max(self.requests)]
            data["median_tokens"] = median(self.tokens)
            data["recurring_share"] = round(self._share, 4)
        return data

    def sentence(self) -> str:
        if not self.tokens:
            return (
                f"no {GRAM} tokens in a row recur inside different messages of different requests "
                f"({self.prompt_tokens:,} prompt tokens looked at)"
            )
        fewest, most = min(self.requests), max(self.requests)
        one = len(self.tokens) == 1
        return (
            f"{len(self.tokens):,} text{' recurs' if one else 's recur'} inside messages, in "
            f"{f'{fewest:,}' if fewest == most else f'{fewest:,} to {most:,}'} requests "
            f"(median {median(self.tokens):,.0f} tokens), {100 * self._share:.0f} % of prompt tokens"
        )


def _find(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> _Found:
    texts = _texts(requests, tokenizer)
    found = _Found(prompt_tokens=sum(text.ids.size * text.occurrences for text in texts))
    searched = [text for text in texts if text.is_searched]
    runs, groups = runs_in_requests([text.ids for text in searched], [text.requests for text in searched])
    for same in groups:
        holders = [searched[runs.text[run]] for run in same]
        first = same[0]
        tokens = int(runs.end[first] - runs.start[first])
        found.requests.append(len(set(chain.from_iterable(text.requests for text in holders))))
        found.tokens.append(tokens)
        found.recurring_tokens += tokens * sum(text.occurrences for text in holders)
    places = [[_place(searched, runs, run) for run in same] for same in groups]
    settle(places)
    for place in (place for group in places for place in group if place.start < place.end):
        found.ranges.setdefault(searched[place.where].content, []).append((place.start, place.end))
    for ranges in found.ranges.values():
        ranges.sort()
    return found


def runs_in_requests(
    texts: Sequence[npt.NDArray[np.int32]], requests: Sequence[Collection[int]]
) -> tuple[Runs, list[list[int]]]:
    """Runs that recur, and the indices of those that are the same, where two or more requests have them.

    `requests` are those that each text stands in; of many, two are enough.
    """
    runs = recurring_runs(texts, GRAM, FEWEST_TOKENS)
    groups = [
        same for same in _by_name(runs) if len({number for run in same for number in requests[runs.text[run]]}) > 1
    ]
    return runs, groups


def _by_name(runs: Runs) -> Iterable[list[int]]:
    """The runs that are the same, by the place of the first."""
    same: dict[int, list[int]] = {}
    for run, name in enumerate(runs.name.tolist()):
        same.setdefault(name, []).append(run)
    return same.values()


def _place(texts: Sequence[_Text], runs: Runs, run: int) -> Place:
    """A token that shares its first character with the one before the run gives it to that, and so at the end."""
    where, start, end = (int(values[run]) for values in (runs.text, runs.start, runs.end))
    bounds = texts[where].bounds
    if bounds is None:
        return Place(where, None, start, end)
    while end + 1 < bounds.size and bounds[end] == bounds[end + 1]:
        end -= 1
    return Place(where, texts[where].content[0], int(bounds[start]), int(bounds[end]))


def _texts(requests: Sequence[Request], tokenizer: OffsetTokenizer) -> list[_Text]:
    known: dict[_Content, _Text] = {}
    for number, request in enumerate(requests):
        for segment in chain(request.segments, *request.prelude):
            content = segment.text, segment.token_ids
            text = known.get(content)
            if text is None:
                text = known[content] = _read(content, tokenizer)
            text.occurrences += 1
            text.is_searched |= segment.kind not in GAP_KINDS and (text.bounds is not None or not segment.text)
            if not text.requests or text.requests[-1] != number:
                text.requests.append(number)
    return list(known.values())


def _read(content: _Content, tokenizer: OffsetTokenizer) -> _Text:
    text, carried = content
    if carried is not None:
        return _Text(content, np.array(carried, np.int32), None)
    ids, offsets = tokenizer.offsets(text)
    return _Text(content, np.array(ids, np.int32), np.array(token_bounds(offsets, len(text)), np.int32))
