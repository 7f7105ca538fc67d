"""Recurring runs by their definition, one place after the other: what `kvaudit.segmenting.grams` is held against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvaudit.segmenting.grams import gram_hashes

Gram = tuple[tuple[int, ...], int | None]
Spot = tuple[int, int]


@dataclass(frozen=True)
class Path:
    text: int
    first: int
    last: int
    name: Gram
    count: int


def slow_runs(texts: Sequence[Sequence[int]], gram: int, fewest: int) -> list[tuple[int, int, int]]:
    """(text, start, end) of every run, in order."""
    at = {
        (number, position): found
        for number, text in enumerate(texts)
        for position, found in enumerate(_grams(text, gram))
    }
    spots: dict[Gram, list[Spot]] = defaultdict(list)
    for spot, found in at.items():
        spots[found].append(spot)
    recurs = {found for found, places in spots.items() if len({text for text, _ in places}) > 1}

    def neighbour(spot: Spot, step: int) -> Gram | None:
        found = at.get((spot[0], spot[1] + step))
        return found if found in recurs else None

    def is_joined(spot: Spot) -> bool:
        """Whether the gram at a spot and the next one always follow each other."""
        left, right = at[spot], neighbour(spot, 1)
        if left not in recurs or right is None:
            return False
        return {neighbour(other, 1) for other in spots[left]} == {right} and {
            neighbour(other, -1) for other in spots[right]
        } == {left}

    paths: list[Path] = []
    for number, text in enumerate(texts):
        position = 0
        while position + gram <= len(text):
            name = at[number, position]
            if name not in recurs:
                position += 1
                continue
            last = position
            while is_joined((number, last)):
                last += 1
            paths.append(Path(number, position, last, name, len(spots[name])))
            position = last + 1
    return _kept(paths, gram, fewest)


def _grams(text: Sequence[int], gram: int) -> list[Gram]:
    """With those that repeat themselves numbered from the first with the least hash on."""
    plain = [tuple(text[at : at + gram]) for at in range(len(text) - gram + 1)]
    periods = [
        next((step for step in range(1, gram) if plain[at : at + 1] == plain[at + step : at + step + 1]), None)
        for at in range(len(plain))
    ]
    numbers: list[int | None] = [None] * len(plain)
    at = 0
    while at < len(plain):
        period, end = periods[at], at + 1
        while period and end < len(plain) and periods[end] == period:
            end += 1
        if period:
            least = min(range(at, at + period), key=lambda spot: _hash(plain[spot]))
            for spot in range(at, end + period):
                numbers[spot] = spot - least
        at = end
    return list(zip(plain, numbers, strict=True))


def _hash(found: Sequence[int]) -> int:
    return int(gram_hashes(np.array(found, np.int32), len(found))[0])


def _kept(paths: Sequence[Path], gram: int, fewest: int) -> list[tuple[int, int, int]]:
    def leads(left: int, right: int) -> bool:
        """Whether one path follows another at once, in either direction."""
        low, high = sorted((left, right))
        return (
            low >= 0
            and high < len(paths)
            and paths[low].text == paths[high].text
            and paths[high].first == paths[low].last + 1
        )

    def is_document(index: int) -> bool:
        return not any(
            leads(index, other) and paths[other].count > paths[index].count for other in (index - 1, index + 1)
        )

    def wins(index: int, other: int) -> bool:
        step = 1 if other > index else -1
        way = list(range(index, other + step, step))
        falls = all(leads(here, there) and paths[there].count < paths[here].count for here, there in pairwise(way))
        return falls or (is_document(index) and not is_document(other))

    lost: dict[Gram, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for index, path in enumerate(paths):
        covered = range(path.first, path.last + gram)
        rivals = [
            other
            for other, found in enumerate(paths)
            if other != index
            and found.text == path.text
            and found.first < covered.stop
            and covered.start < found.last + gram
            and not wins(index, other)
        ]
        start = max([covered.start, *(paths[other].last + gram for other in rivals if other < index)])
        end = min([covered.stop, *(paths[other].first for other in rivals if other > index)])
        left, right = lost[path.name]
        lost[path.name] = max(left, start - covered.start), max(right, covered.stop - end)
    runs = []
    for path in paths:
        left, right = lost[path.name]
        start, end = path.first + left, path.last + gram - right
        if end - start >= fewest:
            runs.append((path.text, start, end))
    return runs
