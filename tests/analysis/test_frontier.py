"""The frontier: what no other row beats, and what intervals leave open."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.analysis.frontier import Point, standings
from kvaudit.analysis.stats import Estimate


def estimate(value, spread=0.0):
    return Estimate(value, value - spread, value + spread, 10, "")


def point(fidelity, variation, speedup, spread=0.0):
    return Point(*(None if value is None else estimate(value, spread) for value in (fidelity, variation, speedup)))


values = st.integers(0, 4).map(lambda value: value / 4)
points = st.lists(st.builds(point, values, values, values), min_size=1, max_size=12)


def beats(a, b):
    better = a.fidelity.value >= b.fidelity.value and a.variation.value <= b.variation.value
    better = better and a.speedup.value >= b.speedup.value
    return better and (a.fidelity, a.variation, a.speedup) != (b.fidelity, b.variation, b.speedup)


def test_the_better_one_beats():
    assert standings([point(0.9, 0.1, 1.5), point(0.8, 0.2, 1.4)]) == ["frontier", "beaten"]


def test_a_trade_leaves_both():
    assert standings([point(0.9, 0.1, 1.2), point(0.8, 0.1, 1.4)]) == ["frontier", "frontier"]


@pytest.mark.parametrize(("better", "worse"), [(0.0, 1.0), (0.1, 0.2)])
def test_less_variation_is_better(better, worse):
    assert standings([point(0.5, worse, 1), point(0.5, better, 1)]) == ["beaten", "frontier"]


def test_overlapping_intervals_are_told():
    found = standings([point(0.9, 0.1, 1.5, 0.2), point(0.8, 0.2, 1.4, 0.2)])
    assert found == ["frontier", "within-intervals"]


def test_one_measure_that_lies_apart_is_enough():
    far = replace(point(0.8, 0.2, 1.4, 0.2), speedup=estimate(0.5, 0.1))
    assert standings([point(0.9, 0.1, 1.5, 0.2), far]) == ["frontier", "beaten"]


def test_what_has_no_interval_is_told_apart_from_nothing():
    bare = Estimate(0.2, None, None, 3, "")
    assert standings([point(0.9, 0.1, 1.5), Point(bare, bare, bare)]) != ["frontier", "beaten"]


@pytest.mark.parametrize("lacking", range(3))
def test_a_missing_measure_neither_beats_nor_is_beaten(lacking):
    measures = [0.1, 0.9, 0.5]
    measures[lacking] = None
    assert standings([point(*measures), point(0.9, 0.1, 1.5)]) == ["unknown", "frontier"]
    strong = [1.0, 0.0, 9.0]
    strong[lacking] = None
    assert standings([point(*strong), point(0.9, 0.1, 1.5)]) == ["unknown", "frontier"]


def test_no_point_at_all():
    assert standings([]) == []


@given(points)
def test_the_frontier_is_just_what_nothing_beats(found):
    for mine, standing in zip(found, standings(found), strict=True):
        assert (standing == "frontier") == (not any(beats(other, mine) for other in found))


@given(points, st.builds(point, values, values, values))
def test_another_row_never_brings_one_back(found, added):
    before, after = standings(found), standings([*found, added])
    assert all(now != "frontier" or then == "frontier" for then, now in zip(before, after, strict=False))


@given(points, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(found, luck):
    places = list(range(len(found)))
    luck.shuffle(places)
    shuffled = standings([found[place] for place in places])
    assert [shuffled[places.index(place)] for place in range(len(found))] == standings(found)
