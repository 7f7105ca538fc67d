"""Power against brute force: every number of discordant requests and every way they can point, one by one."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvaudit.analysis import power, stats


@cache
def significant(first: int, second: int) -> bool:
    return stats.mcnemar_p(first, second) <= 0.05


def by_hand(n: int, difference: float, discordance: float) -> float:
    """The multinomial probability of every significant outcome."""
    ahead, behind = (discordance + difference) / 2, (discordance - difference) / 2
    return sum(
        math.comb(n, first)
        * math.comb(n - first, second)
        * ahead**first
        * behind**second
        * max(0.0, 1 - discordance) ** (n - first - second)
        for first in range(n + 1)
        for second in range(n - first + 1)
        if significant(first, second)
    )


@pytest.mark.parametrize(
    ("n", "difference", "discordance"),
    [(5, 1, 1), (6, 1, 1), (16, 0.3, 0.4), (40, 0.2, 0.2), (40, 0.1, 0.5), (25, 0, 1)],
)
def test_power_is_the_sum_over_every_outcome(n, difference, discordance):
    assert power.paired_power(n, difference, discordance) == pytest.approx(
        by_hand(n, difference, discordance), abs=1e-9
    )


def test_nothing_discordant_is_never_significant():
    assert power.paired_power(100, 0, 0) == 0
    assert power.paired_power(0, 0.5, 0.5) == 0


def test_a_test_of_equal_policies_errs_at_most_as_often_as_stated():
    assert all(power.paired_power(n, 0, share) <= 0.05 for n in (10, 60, 500) for share in (0.05, 0.3, 1))


def test_power_agrees_with_simulated_audits():
    generator, n, runs = np.random.default_rng(0), 120, 4_000
    first, second, _ = generator.multinomial(n, (0.15, 0.05, 0.8), runs).T
    found = np.mean([significant(*counts) for counts in zip(first, second, strict=True)])
    assert found == pytest.approx(power.paired_power(n, 0.1, 0.2), abs=0.02)


@settings(deadline=None)
@given(st.integers(1, 3_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_the_smallest_difference_is_seen_and_a_smaller_one_is_not(counts):
    n, discordant = counts
    discordance = discordant / n
    found = power.smallest_difference(n, discordance)
    if found is None:
        assert power.paired_power(n, 1, 1) < 0.8
        return
    for difference, seen in ((min(1, found + 1e-5), True), (found - 1e-5, False)):
        assert (power.paired_power(n, difference, max(difference, discordance)) >= 0.8) is seen


def test_the_smallest_difference_of_the_paper_s_control_is_more_than_it_observed():
    """16 and 9 of 500 differ: with as many discordant requests 7 points would have been found, 1.4 were there."""
    found = power.smallest_difference(500, 25 / 500)
    assert found == pytest.approx(0.0289, abs=5e-4)
    assert found > 7 / 500


def test_where_fewer_requests_differ_than_the_difference_all_point_one_way():
    """Then 6 of them are needed: with 5 the exact test can only say 2/32."""
    found = power.smallest_difference(60, 0)
    below_six = sum(math.comb(60, m) * found**m * (1 - found) ** (60 - m) for m in range(6))
    assert below_six == pytest.approx(0.2, abs=1e-4)
    assert power.smallest_difference(60, 0.01) == pytest.approx(found, abs=1e-6)


def test_too_few_requests_see_nothing_however_large():
    assert power.smallest_difference(5, 0.5) is None
    assert power.smallest_difference(0, 0.5) is None
    assert power.smallest_difference(6, 1.0) < 1


def test_overlapping_requests_see_what_their_blocks_would():
    assert power.smallest_difference(200, 0.1, 4) == power.smallest_difference(50, 0.1)
    assert power.requests_needed(0.05, 0.1, 84) == 84 * power.requests_needed(0.05, 0.1)


@pytest.mark.parametrize(
    ("difference", "discordance"),
    [
        (0.05, 0),
        (0.05, 0.05),
        (0.05, 0.2),
        (0.03, 0.1),
        (0.2, 0.9),
        (0.3, 1),
        (0.1, 1),
        (1, 1),
        (0.9, 0.95),
        (0.5, 0.3),
    ],
)
def test_requests_needed_is_the_last_time_that_power_rises_above_its_mark(difference, discordance):
    needed = power.requests_needed(difference, discordance)
    share = max(difference, discordance)
    seen = [power.paired_power(n, difference, share) >= 0.8 for n in range(1, needed + 150)]
    assert all(seen[needed - 1 :])
    assert not seen[needed - 2]


def test_an_exact_test_can_lose_power_with_one_more_request():
    """Why the last crossing counts: enough at first is not enough for good."""
    needed = power.requests_needed(0.3, 1)
    assert any(power.paired_power(n, 0.3, 1) >= 0.8 for n in range(1, needed - 1))


@pytest.mark.parametrize("difference", [0, -0.1, 1.1])
def test_no_number_of_requests_shows_what_is_no_difference(difference):
    assert power.requests_needed(difference, 0.5) is None


def test_requests_needed_and_smallest_difference_are_two_sides_of_one_question():
    for difference in (0.01, 0.02, 0.05):
        n = power.requests_needed(difference, 0.12)
        assert power.smallest_difference(n, 0.12) <= difference + 1e-6
        assert power.smallest_difference(n * 9 // 10, 0.12) > difference


def test_a_large_audit_is_answered_at_once():
    assert power.smallest_difference(40_000, 0.1) == pytest.approx(2.8 * math.sqrt(0.1 / 40_000), rel=0.01)
    assert power.requests_needed(0.01, 0.5) == pytest.approx(7.85 * 0.5 / 0.01**2, rel=0.01)
