"""Runs of token ids that recur, wherever they stand: maximal paths without branches through the recurring k-grams.

A k-gram recurs where two texts hold it. Where it is always followed by the same k-gram, and that one always preceded
by it, both belong to one path: so a path ends where texts begin to differ, and is the same in all of them. Paths that
follow each other overlap, by k - 1 tokens where one leads into the other, or by what they have in common. A document is
a path that leads to none that occurs more often; others only lead from one to the next, and what overlaps is the
document's. On the way from a path, what is rarer and rarer has no part in it. What two have equal rights in belongs to
neither, and what a path loses in one place it loses in all. What is left of it is the run.

Where a text repeats itself with a period below k, its k-grams would have several neighbours. There each is told from
its repetitions by how far it stands from the first that has the least hash: so the stretch is one path, and stretches
of other lengths or phases have in common what the shorter one has, to within a period.

Time and memory grow with the number of tokens (k-grams are told by 64-bit hashes and sorted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Runs:
    """Recurring runs in the order in which they stand, arrays of equal length.

    `text` is the index of the text, [`start`, `end`) the range of its tokens. Runs with the same `name` have the same
    token ids.
    """

    text: Ints
    start: Ints
    end: Ints
    name: Ints


def recurring_runs(texts: Sequence[npt.NDArray[np.int32]], gram: int, fewest: int) -> Runs:
    """Runs of at least `fewest` tokens; what recurs is `gram` tokens or longer (2 or more)."""
    sizes = np.array([text.size for text in texts], np.int64)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if texts else sizes
    text_of = np.repeat(np.arange(sizes.size, dtype=np.int32), sizes)
    if text_of.size < gram:
        return _no_runs()
    ids = np.concatenate(texts)
    positions, classes = _recurring_grams(ids, text_of, gram)
    if not positions.size:
        return _no_runs()
    paths = _paths(positions, classes, ids.size, gram)
    left, right = _limits(paths)
    names = paths.name
    lost_left, lost_right = (np.zeros(int(names.max()) + 1, np.int64) for _ in range(2))
    np.maximum.at(lost_left, names, left - paths.start)
    np.maximum.at(lost_right, names, paths.end - right)
    start, end = paths.start + lost_left[names], paths.end - lost_right[names]
    kept = end - start >= fewest
    text = text_of[paths.start[kept]].astype(np.int64)
    return Runs(
        text,
        start[kept] - firsts[text],
        end[kept] - firsts[text],
        names[kept],
    )


def _no_runs() -> Runs:
    none = np.zeros(0, np.int64)
    return Runs(none, none, none, none)


@dataclass(frozen=True, slots=True)
class _Paths:
    """`count` is how often each occurs, `leads_on` whether the next path's first k-gram follows its last at once."""

    start: Ints
    end: Ints
    name: Ints
    count: Ints
    leads_on: Flags


def _recurring_grams(ids: npt.NDArray[np.int32], text_of: npt.NDArray[np.int32], gram: int) -> tuple[Ints, Ints]:
    """Where k-grams stand that two texts hold, sorted by (class, position), and their classes, counted from 0."""
    inside = np.flatnonzero(text_of[: ids.size - gram + 1] == text_of[gram - 1 :])
    hashes = gram_hashes(ids, gram)[inside]
    order = np.argsort(hashes, kind="stable")
    if _number_repetitions(inside, hashes, order, gram):
        order = np.argsort(hashes, kind="stable")
    positions, hashes = inside[order], hashes[order]
    if not positions.size:
        return positions, positions
    texts = text_of[positions]
    new = np.concatenate([[True], hashes[1:] != hashes[:-1]])
    classes = np.cumsum(new) - 1
    new_text = new.copy()
    new_text[1:] |= texts[1:] != texts[:-1]
    recurring = (np.bincount(classes[new_text]) > 1)[classes]
    positions, classes = positions[recurring], classes[recurring]
    return positions, np.cumsum(np.concatenate([[0], (classes[1:] != classes[:-1]).astype(np.int64)]))[: classes.size]


def _number_repetitions(positions: Ints, hashes: Hashes, order: Ints, gram: int) -> bool:
    """Make the hashes in stretches that repeat themselves different in place; whether there were any.

    `order` sorts them, and equal ones by their positions. Those less than a k-gram apart are in one text.
    """
    periods = np.zeros(hashes.size, np.int64)
    here, there = order[:-1], order[1:]
    steps = positions[there] - positions[here]
    periods[here] = np.where((hashes[here] == hashes[there]) & (steps < gram), steps, 0)
    repeats = np.flatnonzero(periods)
    if not repeats.size:
        return False
    new = np.concatenate([[True], (np.diff(repeats) != 1) | (np.diff(periods[repeats]) != 0)])
    firsts, lasts = repeats[new], repeats[np.concatenate([new[1:], [True]])]
    numbers = np.zeros(hashes.size, np.int64)
    in_stretch = np.zeros(hashes.size, np.bool_)
    for first, last, period in zip(firsts.tolist(), lasts.tolist(), periods[firsts].tolist(), strict=True):
        least = first + int(hashes[first : first + period].argmin())
        numbers[first : last + period + 1] = np.arange(first - least, last + period + 1 - least)
        in_stretch[first : last + period + 1] = True
    hashes[in_stretch] = _pair(hashes[in_stretch], numbers[in_stretch].astype(np.uint64), 0)
    return True


def _paths(positions: Ints, classes: Ints, size: int, gram: int) -> _Paths:
    class_at = np.full(size + 1, -1, np.int64)
    class_at[positions] = classes
    starts = np.flatnonzero(np.concatenate([[True], classes[1:] != classes[:-1]]))
    one_next, one_before = (_is_one(class_at[positions + step], starts) for step in (1, -1))
    where = np.flatnonzero(class_at >= 0)
    at = class_at[where]
    follows = where[1:] == where[:-1] + 1
    joined = follows & one_next[at[:-1]] & one_before[at[1:]]
    firsts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    lasts = np.concatenate([firsts[1:], [where.size]]) - 1
    counts = np.diff(np.concatenate([starts, [classes.size]]))
    names = at[firsts]
    return _Paths(where[firsts], where[lasts] + gram, names, counts[names], follows[lasts[:-1]])


def _is_one(neighbours: Ints, starts: Ints) -> Flags:
    """For each class, whether all its places have the same neighbour."""
    same: Flags = np.minimum.reduceat(neighbours, starts) == np.maximum.reduceat(neighbours, starts)
    return same


def _limits(paths: _Paths) -> tuple[Ints, Ints]:
    """Where what belongs to each path begins, and where it ends."""
    count, leads_on = paths.count, paths.leads_on
    document = np.ones(count.size, np.bool_)
    document[:-1] &= ~(leads_on & (count[1:] > count[:-1]))
    document[1:] &= ~(leads_on & (count[:-1] > count[1:]))
    right = _right_limits(paths.start, paths.end, document, leads_on & (count[1:] < count[:-1]))
    mirrored = _right_limits(
        -paths.end[::-1], -paths.start[::-1], document[::-1], (leads_on & (count[:-1] < count[1:]))[::-1]
    )
    return -mirrored[::-1], right


def _right_limits(start: Ints, end: Ints, document: Flags, leads_to_rarer: Flags) -> Ints:
    """Each path reaches to the first one that overlaps it and has as much right as itself."""
    limits = end.copy()
    path = np.arange(start.size)
    rarer = np.ones(start.size, np.bool_)
    step = 0
    while path.size:
        step += 1
        overlaps = path + step < start.size
        overlaps[overlaps] = start[path[overlaps] + step] < end[path[overlaps]]
        path, rarer = path[overlaps], rarer[overlaps]
        rarer &= leads_to_rarer[path + step - 1]
        stays = rarer | (document[path] & ~document[path + step])
        limits[path[~stays]] = start[path[~stays] + step]
        path, rarer = path[stays], rarer[stays]
    return limits


def gram_hashes(ids: npt.NDArray[np.int32], gram: int) -> Hashes:
    """A hash of the `gram` ids from each position on, put together from hashes of powers of two."""
    power = _mixed(ids.astype(np.uint64) + np.uint64(1))
    whole, length, covered = power[:0], 1, 0
    while True:
        if gram & length:
            whole = _pair(whole, power, covered) if covered else power
            covered += length
        length *= 2
        if length > gram:
            return whole[: ids.size - gram + 1]
        power = _pair(power, power, length // 2)


def _pair(left: Hashes, right: Hashes, distance: int) -> Hashes:
    """Hashes of what `left` stands for together with what `right` stands for `distance` further on."""
    size = min(left.size, right.size - distance)
    return _mixed(left[:size] * np.uint64(0x9E3779B97F4A7C15) + right[distance : distance + size])


def _mixed(values: Hashes) -> Hashes:
    """splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014): every bit of the input reaches every bit."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
