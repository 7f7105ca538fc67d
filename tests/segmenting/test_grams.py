"""Recurring runs of token ids, against a slow reference and against texts that were planted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_runs import slow_runs

from kvaudit.segmenting.grams import gram_hashes, recurring_runs

UNHURRIED = settings(deadline=None)


def runs(texts: Sequence[Sequence[int]], gram: int, fewest: int) -> list[tuple[int, int, int]]:
    found = recurring_runs([np.array(text, np.int32) for text in texts], gram, fewest)
    return list(zip(found.text.tolist(), found.start.tolist(), found.end.tolist(), strict=True))


@UNHURRIED
@given(st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=5), st.integers(2, 5), st.integers(1, 6))
def test_runs_are_those_of_the_definition(texts: list[list[int]], gram: int, fewest: int) -> None:
    assert runs(texts, gram, fewest) == slow_runs(texts, gram, fewest)


BLOCKS = [[100 * block + token for token in range(9)] for block in range(1, 6)]


@UNHURRIED
@given(
    st.lists(st.lists(st.integers(0, 4) | st.lists(st.integers(0, 3), max_size=3), max_size=8), min_size=2, max_size=6)
)
def test_runs_of_texts_made_of_blocks_are_those_of_the_definition(parts: list[list[int | list[int]]]) -> None:
    """Blocks recur in many contexts, with glue between them that recurs too."""
    texts = [[token for part in text for token in (BLOCKS[part] if isinstance(part, int) else part)] for text in parts]

    assert runs(texts, 4, 2) == slow_runs(texts, 4, 2)


@UNHURRIED
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=7), min_size=2, max_size=7))
def test_a_planted_text_is_one_run_wherever_it_stands(sequences: list[list[int]]) -> None:
    texts = [[token for block in sequence for token in BLOCKS[block]] for sequence in sequences]
    found = runs(texts, 4, 2)
    for block in range(5):
        places = [
            (number, at) for number, sequence in enumerate(sequences) for at, one in enumerate(sequence) if one == block
        ]
        before = {sequences[number][at - 1] if at else None for number, at in places}
        after = {[*sequences[number], None][at + 1] for number, at in places}
        if len({number for number, _ in places}) > 1 and len(before) > 1 and len(after) > 1:
            assert all((number, 9 * at, 9 * at + 9) in found for number, at in places)


def test_what_neighbours_share_belongs_to_neither() -> None:
    glue, (one, two) = [7, 7, 8], BLOCKS[:2]
    texts = [[1, *glue, *one, *glue, *two, *glue, 2], [3, *glue, *two, *glue, *one, *glue, 4]]

    assert runs(texts, 4, 4) == [(0, 4, 13), (0, 16, 25), (1, 4, 13), (1, 16, 25)]


def test_what_stands_around_a_text_in_all_its_places_belongs_to_it() -> None:
    texts = [[1, 7, *BLOCKS[0], 8, 2], [3, 7, *BLOCKS[0], 8, 4]]

    assert runs(texts, 4, 4) == [(0, 1, 12), (1, 1, 12)]


def test_what_recurs_in_one_text_only_is_no_run() -> None:
    assert runs([[*BLOCKS[0], 1, *BLOCKS[0], 2], [3, 4, 5, 6, 7]], 4, 2) == []


@pytest.mark.parametrize("texts", [[], [[]], [[1, 2], []], [[1] * 3] * 2])
def test_texts_shorter_than_a_gram_have_no_runs(texts: list[list[int]]) -> None:
    assert runs(texts, 4, 1) == []


@pytest.mark.parametrize("period", [1, 2, 3, 7, 31, 32, 40])
def test_a_text_that_repeats_itself_is_found_wherever_it_stands(period: int) -> None:
    """As one stretch where its period is below a k-gram, of which the phase may cost one period; row by row else."""
    rows = list(range(1, period + 1))
    texts = [[100, *rows * 90], [101, 102, *rows * 70, 103], [104, *rows[period // 2 :], *rows * 80, 105]]
    found = runs(texts, 32, 16)

    longest = [max(end - start for text, start, end in found if text == number) for number in range(3)]
    assert min(longest) >= (69 * period if period < 32 else 16)


def test_a_stretch_that_repeats_itself_does_not_cut_the_text_around_it() -> None:
    text = [*BLOCKS[0], *[5, 6] * 20, *BLOCKS[1]]

    assert runs([[1, *text, 2], [3, 3, *text, 4]], 4, 4) == [(0, 1, 59), (1, 2, 60)]


@pytest.mark.parametrize("gram", [2, 3, 5, 8, 21, 32])
def test_equal_grams_and_no_others_have_equal_hashes(gram: int) -> None:
    ids = np.random.default_rng(0).integers(0, 2, 3000).astype(np.int32)
    hashes = gram_hashes(ids, gram).tolist()
    grams = [tuple(ids[at : at + gram].tolist()) for at in range(ids.size - gram + 1)]

    assert len(hashes) == len(grams)
    assert len(set(zip(grams, hashes, strict=True))) == len(set(grams)) == len(set(hashes))
