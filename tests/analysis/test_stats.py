import math
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom
from statsmodels.stats import inter_rater

from kvaudit.analysis import stats


def wilson_by_hand(successes: int, n: int) -> tuple[float, float]:
    """Wilson (1927), as in textbooks."""
    z, p = 1.959963984540054, successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return centre - half, centre + half


@settings(deadline=None)
@given(st.integers(1, 5_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_the_textbook_formula(counts):
    successes, n = counts
    estimate = stats.wilson(successes, n)
    low, high = wilson_by_hand(successes, n)
    assert (estimate.low, estimate.high) == (pytest.approx(max(low, 0), abs=1e-12), pytest.approx(min(high, 1)))
    assert estimate.value == successes / n


def test_no_requests_give_no_share():
    assert stats.wilson(0, 0) is None
    assert stats.smallest_visible(0) is None


def test_mcnemar_gives_the_paper_s_reset_control():
    """16 against 9 discordant of 500 requests: p = 0.23, here as a sum of exact fractions."""
    by_hand = 2 * sum(Fraction(math.comb(25, rarer), 2**25) for rarer in range(10))
    assert round(float(by_hand), 2) == 0.23
    assert stats.mcnemar_p(16, 9) == pytest.approx(float(by_hand), rel=1e-12)
    assert stats.mcnemar_p(9, 16) == stats.mcnemar_p(16, 9)


@pytest.mark.parametrize(("successes", "shown"), [(470, "94.0"), (463, "92.6")])
def test_wilson_of_the_paper_s_fidelities_is_where_the_score_test_stops(successes, shown):
    """The bounds are the shares p that are 1.96 standard errors of p itself away from what was seen."""
    estimate = stats.wilson(successes, 500)
    assert f"{100 * estimate.value:.1f}" == shown
    for bound in (estimate.low, estimate.high):
        assert abs(estimate.value - bound) / math.sqrt(bound * (1 - bound) / 500) == pytest.approx(1.959963984540054)
    assert estimate.low < estimate.value < estimate.high


def test_mcnemar_without_discordant_requests_says_nothing():
    assert stats.mcnemar_p(0, 0) == 1


def test_mcnemar_is_the_two_sided_sign_test():
    assert stats.mcnemar_p(7, 1) == pytest.approx(2 * binom.cdf(1, 8, 0.5))


def test_cochran_over_two_conditions_is_mcnemar_s_chi_square():
    right = np.array([[True, False]] * 12 + [[False, True]] * 4 + [[True, True]] * 30)
    statistic, p = stats.cochran(right)
    assert statistic == pytest.approx((12 - 4) ** 2 / 16)
    assert p < 0.05


def test_cochran_is_undefined_where_every_request_is_answered_alike():
    assert stats.cochran(np.ones((5, 3), bool)) is None
    assert stats.cochran(np.ones((5, 1), bool)) is None
    assert stats.cochran(np.ones((0, 3), bool)) is None


def test_holm_steps_down():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([]) == []


def test_smallest_visible_share_would_have_shown():
    share = stats.smallest_visible(16)
    assert (1 - share) ** 16 == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("overlap", "n", "expected"),
    [(1, 500, 1), (8, 16, 4), (84, 7_735, 84), (84, 500, 25), (8, 100, 8), (6, 4, 2), (5, 1, 1), (5, 0, 1)],
)
def test_blocks_follow_the_overlap_and_leave_enough_of_them(overlap, n, expected):
    assert stats.block_length(overlap, n) == expected


def test_an_interval_holds_the_mean_and_is_the_same_for_the_same_seed():
    values = np.random.default_rng(0).choice([0, 0.4, 0.6], size=(2, 60))
    first = stats.mean_intervals(values, 1, (0, 1), seed=7)
    assert first == stats.mean_intervals(values, 1, (0, 1), seed=7)
    assert first != stats.mean_intervals(values, 1, (0, 1), seed=8)
    for row, estimate in zip(values, first, strict=True):
        assert estimate.low < row.mean() < estimate.high
        assert estimate.value == pytest.approx(row.mean())
        assert estimate.method.startswith("BCa bootstrap over requests")


def test_requests_that_say_nothing_are_left_out():
    values = np.array([[0.0, 1.0, np.nan, 1.0, 0.0, np.nan], [np.nan] * 6])
    estimate, nothing = stats.mean_intervals(values, 1, (0, 1), seed=0)
    assert (estimate.value, estimate.n) == (0.5, 4)
    assert nothing is None


def test_blocks_widen_the_interval_of_a_stream_with_runs():
    runs = np.repeat(np.random.default_rng(1).integers(0, 2, 40), 10)[None].astype(float)
    (apart,) = stats.mean_intervals(runs, 1, (0, 1), seed=0)
    (together,) = stats.mean_intervals(runs, 10, (0, 1), seed=0)
    assert together.high - together.low > 2 * (apart.high - apart.low)
    assert "blocks of 10 requests" in together.method


def test_no_variation_is_bounded_exactly_and_never_by_zero():
    (estimate,) = stats.mean_intervals(np.zeros((1, 16)), 3, (0, 1), seed=0)
    assert estimate.low == 0
    assert estimate.high == pytest.approx(1 - 0.025 ** (1 / 5))
    assert estimate.n == 16
    assert "Clopper-Pearson" in estimate.method
    assert "in blocks of 3, since their windows overlap" in estimate.method
    (apart,) = stats.mean_intervals(np.zeros((1, 16)), 1, (0, 1), seed=0)
    assert apart.high == pytest.approx(1 - 0.025 ** (1 / 16))
    assert "blocks" not in apart.method


def test_wilson_over_blocks_is_that_of_fewer_requests_with_the_same_share():
    apart, together = stats.wilson(6, 10), stats.wilson(18, 32, block=3)
    assert (together.value, together.n) == (18 / 32, 32)
    assert together.low < apart.low
    assert (stats.wilson(18, 30, block=3).low, stats.wilson(18, 30, block=3).high) == pytest.approx(
        (apart.low, apart.high)
    )
    assert stats.independent(2, 3) == 1


def test_the_same_value_everywhere_is_bounded_on_both_sides():
    (variation,) = stats.mean_intervals(np.full((1, 20), 0.4), 1, (0, 1), seed=0)
    unseen = stats.upper_bound_of_none(20)
    assert (variation.low, variation.high) == pytest.approx((0.4 - 0.4 * unseen, 0.4 + 0.6 * unseen))
    (difference,) = stats.mean_intervals(np.zeros((1, 20)), 1, (-1, 1), seed=0)
    assert (difference.low, difference.high) == pytest.approx((-unseen, unseen))


def test_one_block_pattern_that_bca_cannot_handle_falls_back_and_says_so(monkeypatch):
    whole = stats._interval

    def undefined(sums, sizes, method, seed):
        low, high = whole(sums, sizes, method, seed)
        return (np.full_like(low, np.nan), high) if method == "BCa" else (low, high)

    monkeypatch.setattr(stats, "_interval", undefined)
    (estimate,) = stats.mean_intervals(np.array([[0.0, 1.0] * 10]), 1, (0, 1), seed=0)
    assert estimate.method.startswith("percentile")
    assert 0 < estimate.low < 0.5 < estimate.high < 1


def test_a_long_stream_is_resampled_in_few_blocks_with_the_same_interval():
    values = np.random.default_rng(2).integers(0, 2, (1, 20_000)).astype(float)
    (estimate,) = stats.mean_intervals(values, 1, (0, 1), seed=0)
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(20_000), rel=0.1)


@pytest.mark.slow
def test_bootstrap_intervals_cover():
    generator, covered, runs = np.random.default_rng(3), 0, 200
    for seed in range(runs):
        values = (generator.random((1, 80)) < 0.25) * generator.choice([0.4, 0.6], (1, 80))
        (estimate,) = stats.mean_intervals(values, 1, (0, 1), seed)
        covered += estimate.low <= 0.125 <= estimate.high
    assert 0.90 <= covered / runs <= 0.99


@pytest.mark.slow
def test_block_intervals_cover_where_neighbours_are_alike():
    generator, covered, plain, runs = np.random.default_rng(4), 0, 0, 200
    for seed in range(runs):
        noise = generator.normal(size=204)
        smooth = np.convolve(noise, np.ones(5) / math.sqrt(5), "valid")
        values = (smooth < -0.5244)[None] * 0.5  # a share of 0.3
        (estimate,) = stats.mean_intervals(values, stats.block_length(5, 200), (0, 1), seed)
        (apart,) = stats.mean_intervals(values, 1, (0, 1), seed)
        covered += estimate.low <= 0.15 <= estimate.high
        plain += apart.low <= 0.15 <= apart.high
    assert covered / runs >= 0.86
    assert covered > plain


def test_an_upper_bound_of_a_mean_is_never_below_the_one_of_no_damage():
    assert stats.upper_bound_of_mean(0.0, 60) == stats.upper_bound_of_none(60)
    assert stats.upper_bound_of_mean(1e-6, 5) == stats.upper_bound_of_none(5)
    assert stats.upper_bound_of_mean(0.2, 60) == pytest.approx(wilson_by_hand(12, 60)[1])
    assert stats.upper_bound_of_mean(0.2, 180, block=3) == pytest.approx(wilson_by_hand(12, 60)[1])


def test_counts_of_mcnemar_are_rounded_towards_no_difference():
    assert stats.mcnemar_p(11, 0, 0.5) == stats.mcnemar_p(5, 0)
    assert stats.mcnemar_p(0, 11, 0.5) == stats.mcnemar_p(0, 5)
    assert stats.mcnemar_p(9, 1, 0.25) == stats.mcnemar_p(2, 1)
    assert stats.mcnemar_p(3, 3, 0.5) == 1


def test_a_repeat_agrees_by_luck_as_often_as_two_runs_do():
    one_odd, two_odd = np.array([0, 0, 0, 0, 0, 1]), np.array([0, 0, 0, 0, 1, 2])
    agree = np.stack([runs[:, None] == runs for runs in (one_odd, two_odd, np.zeros(6))], axis=2)
    assert stats.chance_of_reproducing(agree) == pytest.approx(10 / 15 * 6 / 15)
    assert stats.chance_of_reproducing(agree[:, :, 2:]) == 1
    assert stats.chance_of_reproducing(np.eye(6, dtype=bool)[:, :, None]) == 0
    assert stats.chance_of_reproducing(np.ones((1, 1, 4), bool)) == 1
    assert stats.chance_of_reproducing(np.ones((6, 6, 0), bool)) == 1


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=2))
def test_the_luck_of_a_repeat_is_a_count_of_all_ways_to_name_the_runs(answers):
    """Every request's answers dealt to the runs in every way; run 0 is chronological, run 3 its repeat."""
    dealt = list(product(*(permutations(row) for row in answers)))
    lucky = sum(all(request[0] == request[3] for request in deal) for deal in dealt)
    runs = np.array(answers).T
    assert stats.chance_of_reproducing(runs[:, None] == runs[None]) == pytest.approx(lucky / len(dealt))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(1, 3))
def test_the_luck_of_several_repeats_is_a_count_too(answers, repeats):
    """Runs 3, 4 and 5 are the repeats of runs 0, 1 and 2, or as many of them as there are."""
    deals = list(permutations(answers))
    lucky = sum(all(deal[order] == deal[order + 3] for order in range(repeats)) for deal in deals)
    runs = np.array([answers]).T
    assert stats.chance_of_reproducing(runs[:, None] == runs[None], repeats) == pytest.approx(lucky / len(deals))


def test_kappa_is_that_of_the_dense_table():
    generator = np.random.default_rng(6)
    for requests, raters, categories in ((1, 2, 2), (40, 5, 3), (7, 3, 20), (200, 4, 2)):
        codes = generator.integers(0, categories, (requests, raters)) + 10
        codes[0, 0], codes[0, 1] = 10, 11
        dense = np.array([np.bincount(row - 10, minlength=categories) for row in codes])
        assert stats.fleiss_kappa(codes) == pytest.approx(inter_rater.fleiss_kappa(dense))


def test_kappa_of_one_answer_one_order_or_nothing_is_undefined():
    assert stats.fleiss_kappa(np.zeros((5, 3), np.int64)) is None
    assert stats.fleiss_kappa(np.arange(5)[:, None]) is None
    assert stats.fleiss_kappa(np.zeros((0, 3), np.int64)) is None


def test_kappa_of_many_requests_with_an_answer_each_needs_no_table():
    codes = np.repeat(np.arange(40_000)[:, None], 5, axis=1)
    assert stats.fleiss_kappa(codes) == 1


def wald_by_hand(first: int, second: int, n: int) -> tuple[float, float]:
    """Bonett and Price (2012)."""
    a, b, z = (first + 1) / (n + 2), (second + 1) / (n + 2), 1.959963984540054
    half = z * math.sqrt((a + b - (a - b) ** 2) / (n + 2))
    return a - b - half, a - b + half


def refused_by_hand(first: int, second: int, n: int, difference: float) -> bool:
    """Whether Tango's score test refuses a difference below the observed one; its nuisance share by search."""
    counts = (first, second, n - first - second)

    def surprise(only_second: float) -> float:
        shares = (only_second + difference, only_second, 1 - 2 * only_second - difference)
        return -sum(count * math.log(max(p, 1e-300)) for count, p in zip(counts, shares, strict=True) if count)

    ends = max(0.0, -difference), (1 - difference) / 2
    found = minimize_scalar(surprise, bounds=ends, method="bounded", options={"xatol": 1e-10}).x
    share = min((*ends, found), key=surprise)
    spread = math.sqrt(n * (2 * share + difference - difference**2))
    return first - second - n * difference - 0.5 > 1.959963984540054 * spread


@pytest.mark.parametrize("counts", [(16, 9, 500), (1, 0, 12), (0, 7, 40), (12, 30, 60), (5, 5, 10), (40, 0, 40)])
def test_a_paired_difference_has_the_wider_bound_of_two_published_intervals(counts):
    estimate, (wald, _) = stats.paired_difference(*counts), wald_by_hand(*counts)
    assert estimate.value == (counts[0] - counts[1]) / counts[2]
    assert estimate.method == "adjusted Wald or score, the wider bound"
    assert estimate.low <= wald + 1e-12
    assert refused_by_hand(*counts, estimate.low - 1e-4)
    assert not refused_by_hand(*counts, estimate.low + 1e-4) or estimate.low == pytest.approx(wald)


def test_both_published_intervals_decide_somewhere():
    assert stats.paired_difference(10, 0, 60).low == pytest.approx(wald_by_hand(10, 0, 60)[0])
    assert stats.paired_difference(0, 7, 40).low < wald_by_hand(0, 7, 40)[0] - 0.01


def test_a_paired_difference_is_a_difference_of_shares():
    assert stats.paired_difference(0, 3, 3).low == -1
    assert stats.paired_difference(3, 0, 3).high == 1


def test_paired_differences_mirror_each_other():
    ahead, behind = stats.paired_difference(12, 3, 60), stats.paired_difference(3, 12, 60)
    assert (ahead.low, ahead.high) == pytest.approx((-behind.high, -behind.low))


def test_no_discordant_request_is_bounded_exactly():
    estimate = stats.paired_difference(0, 0, 60)
    assert (estimate.low, estimate.high) == pytest.approx((-(1 - 0.025 ** (1 / 60)), 1 - 0.025 ** (1 / 60)))
    assert "Clopper-Pearson" in estimate.method
    assert stats.paired_difference(0, 0, 60, block=3).high == pytest.approx(stats.upper_bound_of_none(20))


def test_nothing_compared_has_no_difference():
    assert stats.paired_difference(0, 0, 0) is None


def test_a_paired_difference_over_blocks_is_that_of_fewer_requests():
    apart, together = stats.paired_difference(4, 2, 20), stats.paired_difference(12, 6, 60, block=3)
    assert (together.low, together.high) == pytest.approx((apart.low, apart.high))
    assert (together.value, together.n) == (0.1, 60)
    assert "counted in blocks of 3" in together.method


def misses(n: int, bound: np.ndarray, discordance: float, lean: float) -> float:
    """How often the lower bound is above the truth: a sum over every outcome."""
    total, counts = 0.0, np.arange(n + 1)
    for discordant, weight in enumerate(binom.pmf(counts, n, discordance)):
        first = np.arange(discordant + 1)
        wrong = bound[first, discordant - first] > discordance * (2 * lean - 1) + 1e-9
        total += weight * binom.pmf(first, discordant, lean)[wrong].sum()
    return total


@pytest.mark.parametrize(
    "n", [5, 16, 30, pytest.param(60, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)]
)
def test_the_lower_bound_of_a_paired_difference_is_above_the_truth_at_most_as_often_as_stated(n):
    """Exact, over all outcomes: at most 2.5 % where at most half of the requests are discordant.

    Up to 3.5 % where nearly all are. The upper bound mirrors it.
    """
    bound = np.full((n + 1, n + 1), np.nan)
    for first in range(n + 1):
        for second in range(n + 1 - first):
            bound[first, second] = stats.paired_difference(first, second, n).low
    for discordance in (0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0):
        worst = max(misses(n, bound, discordance, lean) for lean in np.linspace(0, 1, 21))
        assert worst <= (0.025 if discordance <= 0.5 else 0.035), discordance


def test_the_interval_of_a_median_is_that_of_order_statistics():
    """The k-th smallest and largest of n values, k the largest with P(Binomial(n, 1/2) < k) at most 2.5 %."""
    for n in (6, 15, 40):
        values = np.random.default_rng(n).normal(size=n)
        k = max(k for k in range(1, n) if binom.cdf(k - 1, n, 0.5) <= 0.025)
        found = stats.median_interval(values)
        ordered = np.sort(values)
        assert (found.low, found.high, found.value) == (ordered[k - 1], ordered[-k], np.median(values))
    assert stats.median_interval(np.arange(3.0)).low is None
    assert stats.median_interval(np.empty(0)) is None
