import math
import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np
import pyarrow as pa
import pytest
from audit_runs import BuiltRun, arm_lines, clean, full_prefill, rounded, run
from hypothesis import given, settings
from hypothesis import strategies as st

from kvaudit.analysis import power, stats
from kvaudit.analysis.audit import analyse
from kvaudit.analysis.compare import EQUAL, agreement, build_grid, compare
from kvaudit.analysis.figures import (
    POINTS,
    Figure,
    answer_codes,
    requests_metric,
    select,
    stream_overlap,
    summary_table,
    variation_by_request,
)
from kvaudit.schema import TABLES
from kvaudit.schema.metrics import METRICS

ORDERS = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")


def figure(built: BuiltRun, metric: str, policy=None, order=None, control=None) -> Figure:
    (found,) = select(analyse(built).figures, metric, policy, order, control)
    return found


def two_policies(first: str, second: str, full: str = "a b c d") -> BuiltRun:
    return run(
        full_prefill(full)
        + arm_lines("p", {"chronological": first, "reversed": first}, full, first)
        + "\n"
        + arm_lines("q", {"chronological": second, "reversed": full}, second, second)
    )


def test_fidelity_is_the_share_equal_to_full_prefill_per_arm():
    built = two_policies("a b c x", "a x x x")
    found = figure(built, "fidelity", "q", "chronological", "none")
    assert (found.value, found.n) == (0.25, 4)
    wilson = stats.wilson(1, 4)
    assert (found.low, found.high, found.test) == (wilson.low, wilson.high, "Wilson")
    assert figure(built, "fidelity", "q", control="reset").value == 0.25
    assert figure(built, "fidelity", "p", control="reset").value == 1


def test_errors_leave_the_share_and_its_count():
    found = figure(two_policies("a b ! x", "a b c d"), "fidelity", "p", "chronological", "none")
    assert (found.value, found.n) == (pytest.approx(2 / 3), 3)


def test_a_policy_without_any_answer_has_no_fidelity():
    found = figure(two_policies("! ! ! !", "a b c d"), "fidelity", "p", "chronological", "none")
    assert (found.value, found.low, found.n) == (None, None, 0)


def test_edit_distance_is_the_mean_over_answers_that_differ():
    assert figure(two_policies("a bxx cx d", "a b c d"), "edit_distance", "p", "reversed").value == 1.5
    assert figure(two_policies("a b c d", "a b c d"), "edit_distance", "p", "reversed").value is None


words = st.sampled_from(["a", "b", "c", "!", "-"])


@settings(deadline=None)
@given(st.lists(st.lists(words, min_size=5, max_size=5), min_size=1, max_size=9))
def test_answer_variation_is_a_loop_over_requests_and_pairs(answers):
    lines = {order: " ".join(row[place] for row in answers) for place, order in enumerate(ORDERS)}
    full = " ".join("a" for _ in answers)
    built = run(full_prefill(full) + arm_lines("p", lines, full, lines["chronological"]))
    grid = build_grid(built.table("observations"), built.table("requests"), built.arms())
    shares = variation_by_request(grid, compare(grid), "p")
    for row, share in zip(answers, shares, strict=True):
        pairs = [(a, b) for a, b in combinations(row, 2) if not {a, b} & {"!", "-"}]
        if pairs:
            assert share == pytest.approx(sum(a != b for a, b in pairs) / len(pairs))
        else:
            assert np.isnan(share)
    (estimate,) = stats.mean_intervals(shares[None], 2, (0, 1), seed=0)
    known = shares[~np.isnan(shares)]
    if not len(known):
        assert estimate is None
        return
    assert (estimate.value, estimate.n) == (pytest.approx(known.mean()), len(known))
    assert estimate.low <= estimate.value + 1e-9
    assert estimate.value <= estimate.high + 1e-9
    if not known.any():
        assert estimate.high == pytest.approx(stats.upper_bound_of_none(stats.independent(len(known), 2)))


def test_answer_variation_is_the_mean_over_requests():
    built = run(
        full_prefill("a a ! a")
        + arm_lines(
            "p", {"chronological": "a a ! a", "reversed": "a b a !", "shuffle-1": "a a ! !"}, "a a a a", "a a ! a"
        )
    )
    found = figure(built, "answer_variation")
    assert (found.value, found.n) == (pytest.approx((0 + 2 / 3) / 2), 2)


def test_requests_that_flip_are_counted_however_few_their_pairs():
    built = run(
        full_prefill("a b c d")
        + arm_lines("p", dict.fromkeys(ORDERS, "a b c d") | {"shuffle-1": "a b c x"}, "a b c d", "a b c d")
    )
    assert figure(built, "flipped_requests").value == 0.25
    assert figure(built, "answer_variation").value == pytest.approx(0.25 * 4 / 10)
    assert figure(built, "smallest_variation").value == pytest.approx(1 - 0.05 ** (1 / 4))


def sixteen_against_nine() -> BuiltRun:
    """The paper's reset control: 16 requests only the first policy gets right, 9 only the second."""
    both, first, second = "a " * 30, "a " * 16 + "x " * 9, "x " * 16 + "a " * 9
    full = "a " * 55
    lines = arm_lines("p", {"chronological": both + first}, both + first, both + first)
    return run(full_prefill(full) + lines + "\n" + arm_lines("q", {"chronological": full}, both + second, full))


def test_the_paper_s_reset_control_gives_its_p_value():
    found = figure(sixteen_against_nine(), "fidelity_difference", "p - q", control="reset")
    assert found.discordant == (16, 9)
    assert found.p_value == pytest.approx(0.23, abs=0.005)
    assert found.value == pytest.approx(7 / 55)
    assert found.low < found.value < found.high


def test_the_paper_s_times_give_its_speed_up():
    """Medians of 2,408 ms against 426 and 415 ms: about 5.7 times as fast, both."""
    times = {"full-prefill": 2408.0, "p": 426.0, "q": 415.0}
    built = two_policies("a b c d", "a b c d").with_rows(lambda row: row | {"ttft_ms": times[row["policy"]]})
    for policy in ("p", "q"):
        found = figure(built, "ttft_speedup", policy).value
        assert found == pytest.approx(float(Fraction(2408) / Fraction(times[policy])))
        assert found == pytest.approx(5.7, abs=0.11)


def test_five_orders_make_ten_pairs_for_each_request():
    lines = arm_lines("p", dict.fromkeys(ORDERS, "a b"), "a b", "a b")
    pairs = [pair for pair in analyse(run(full_prefill("a b") + lines)).pairs if pair.kind == "orders"]
    assert len({frozenset((pair.left, pair.right)) for pair in pairs}) == math.comb(5, 2) == 10


def test_holm_runs_over_all_comparisons_of_policies():
    built = sixteen_against_nine()
    figures = select(analyse(built).figures, "fidelity_difference")
    assert [f.p_adjusted for f in figures] == pytest.approx(stats.holm([f.p_value for f in figures]))
    assert len(figures) == 2
    assert all("Holm over 2" in f.test for f in figures)


def test_policies_are_compared_on_requests_that_both_answered():
    found = figure(two_policies("a ! x d", "x b c !"), "fidelity_difference", "p - q", "chronological", "none")
    assert (found.n, found.discordant) == (2, (1, 1))


def test_cochran_compares_three_policies_at_once():
    full = "a b c d e f"
    lines = [
        arm_lines(name, {"chronological": words, "reversed": full}, full, words)
        for name, words in (("p", full), ("q", full), ("r", "x x x x x f"))
    ]
    built = run(full_prefill(full) + "\n".join(lines))
    found = figure(built, "cochran_policies", order="chronological", control="none")
    statistic, p = stats.cochran(np.array([[True, True, False]] * 5 + [[True, True, True]]))
    assert (found.value, found.p_value, found.n) == (statistic, p, 6)
    assert figure(built, "cochran_policies", order="reversed").p_value is None


def test_two_policies_have_no_cochran():
    assert select(analyse(two_policies("a b c d", "a b c x")).figures, "cochran_policies") == []


def test_orders_of_a_policy_are_compared_pair_by_pair_and_at_once():
    orders = dict.fromkeys(ORDERS, "a b c d e f g h") | {"reversed": "x x x x x x x h"}
    built = run(full_prefill("a b c d e f g h") + arm_lines("p", orders, "a b c d e f g h", orders["chronological"]))
    found = select(analyse(built).figures, "order_difference", "p")
    assert len(found) == 10
    assert found[0].order == "chronological - reversed"
    assert (found[0].value, found[0].discordant, found[0].p_value) == (7 / 8, (7, 0), pytest.approx(2 / 2**7))
    assert figure(built, "cochran_orders", "p").p_value < 0.001


def test_history_loss_is_what_an_order_loses_beyond_the_reset_control():
    built = run(
        full_prefill("a b c d")
        + arm_lines("p", {"chronological": "a b x x", "reversed": "x x x x"}, reset="a b c x", repeat="a b x x")
    )
    assert figure(built, "history_loss", "p", "chronological").value == 0.25
    assert figure(built, "history_loss", "p", "reversed").value == 0.75


def test_repeat_and_noise_are_shares_of_disagreement():
    text = full_prefill("a b c d", "a b c x") + arm_lines(
        "p", {"chronological": "a b c d", "reversed": "a b c d"}, "a b c d", "x x c d"
    )
    assert figure(run(text), "noise_floor").value == 0.25
    assert figure(run(text), "repeat_disagreement", "p").value == 0.5


def test_accuracy_is_against_the_expected_answer_where_there_is_one():
    built = run(
        full_prefill("a b c d")
        + arm_lines("p", {"chronological": "a x c d", "reversed": "a b ! d"}, "a b c d", "a x c d"),
        expected=["a", " b\n", "z", None],
    )
    full = figure(built, "accuracy", "full-prefill", control="none")
    assert (full.value, full.n) == (pytest.approx(2 / 3), 3)
    assert figure(built, "accuracy", "p", "chronological", "none").value == pytest.approx(1 / 3)
    assert figure(built, "accuracy", "p", "reversed").n == 2
    assert select(analyse(run(clean())).figures, "accuracy") == []


def test_variation_of_policies_is_compared_on_the_same_requests():
    built = two_policies("a b c d", "a b x x")
    found = figure(built, "variation_difference", "p - q")
    assert found.value == pytest.approx(-0.5)


def test_luck_of_the_repeat_counts_all_runs_of_a_policy():
    built = run(full_prefill("a b") + arm_lines("p", dict.fromkeys(ORDERS, "a b") | {"reversed": "a x"}, "a b", "a b"))
    assert figure(built, "chance_of_reproducing", "p").p_value == pytest.approx(10 / 15)


def test_luck_of_the_repeat_is_the_product_over_requests():
    full = " ".join(f"w{index}" for index in range(10))
    orders = dict.fromkeys(ORDERS, full) | {"reversed": " ".join(["x"] * 10)}
    built = run(full_prefill(full) + arm_lines("p", orders, full, full))
    found = figure(built, "chance_of_reproducing", "p")
    assert found.p_value == pytest.approx((10 / 15) ** 10)
    assert found.test == "randomisation of runs, request by request"


def test_luck_of_the_repeat_counts_texts_that_equal_tokens_hide():
    built = run(full_prefill("a b") + arm_lines("p", dict.fromkeys(ORDERS, "a b"), "a b", "a b")).with_rows(
        lambda row: row | ({"answer_text": "cut"} if (row["policy"], row["order"]) == ("p", "reversed") else {})
    )
    assert figure(built, "chance_of_reproducing", "p").p_value == pytest.approx((10 / 15) ** 2)


def test_luck_of_the_repeat_leaves_out_requests_that_a_run_did_not_answer():
    orders = dict.fromkeys(ORDERS, "a b c") | {"reversed": "x x c", "shuffle-1": "a ! c"}
    built = run(full_prefill("a b c") + arm_lines("p", orders, "a b c", "a b c"))
    assert figure(built, "chance_of_reproducing", "p").p_value == pytest.approx(10 / 15)


def test_kappa_is_over_the_requests_that_every_order_answered():
    orders = dict.fromkeys(ORDERS, "a b c a") | {"reversed": "a b x !", "shuffle-1": "a b x a"}
    built = run(full_prefill("a b c a") + arm_lines("p", orders, "a b c a", "a b c a"))
    found = figure(built, "fleiss_kappa", "p")
    by_chance = (5**2 + 5**2 + 3**2 + 2**2) / 15**2
    agreeing = (1 + 1 + (3 + 1) / 10) / 3
    assert found.value == pytest.approx((agreeing - by_chance) / (1 - by_chance))
    assert (found.n, found.test) == (3, "Fleiss' kappa, 5 orders")


def test_kappa_is_undefined_where_every_answer_is_the_same_or_missing():
    assert figure(run(clean("p", "a a a")), "fleiss_kappa").value is None
    built = run(clean("p", "a b c"))
    nothing_finished = built.unfinished(*(arm.arm_id for arm in built.arms()))
    only_controls = replace(built, planned=tuple(arm for arm in built.planned if arm.control != "none"))
    for thin in (run(clean("p", "! ! !")), nothing_finished, only_controls):
        found = figure(thin, "fleiss_kappa")
        assert (found.value, found.n) == (None, 0)


def without(*columns: str, where=lambda row: True):
    return lambda row: row | (dict.fromkeys(columns) if where(row) else {})


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (without(), [[0, 1], [2, 3]]),
        (without("answer_ids"), [[0, 1], [2, 2]]),
        (without("answer_text"), [[0, 0], [2, 3]]),
        (without("answer_ids", where=lambda row: row["order"] == "reversed"), [[0, 1], [2, 2]]),
    ],
    ids=["both", "texts alone", "ids alone", "one order without ids"],
)
def test_answers_are_equal_by_all_that_all_of_them_have(edit, expected):
    texts = {"t": "cut", "u": "cut here", "v": "same", "w": "same"}
    orders = {"chronological": "t v", "reversed": "u w"}
    built = run(full_prefill("t v") + arm_lines("p", orders, "t v", "t v"), texts=texts)
    ids = {"t": [7], "u": [7], "v": [8], "w": [9]}
    named = {"cut": "t", "cut here": "u"}
    built = built.with_rows(
        lambda row: (
            row | {"answer_ids": ids[named.get(row["answer_text"], "v" if row["order"] == "chronological" else "w")]}
        )
    ).with_rows(edit)
    grid = build_grid(built.table("observations"), built.table("requests"), built.arms())
    codes = answer_codes(grid, grid.find("p"))
    assert (codes[:, 0] == codes[:, 1]).tolist() == [a == b for a, b in expected]
    assert len(np.unique(codes)) == len(np.unique(expected))
    equal = agreement(grid, *grid.find("p")) == EQUAL
    assert equal.tolist() == (codes[:, 0] == codes[:, 1]).tolist()


def test_nothing_is_compared_where_answers_share_neither_ids_nor_texts():
    built = run(full_prefill("a b") + arm_lines("p", dict.fromkeys(ORDERS, "a b"), "a b", "a b")).with_rows(
        lambda row: row | {("answer_ids" if row["order"] == "reversed" else "answer_text"): None}
    )
    grid = build_grid(built.table("observations"), built.table("requests"), built.arms())
    assert answer_codes(grid, grid.find("p")).shape == (0, 5)


def discordant_runs() -> BuiltRun:
    """Twenty requests; the two policies differ on none, on two and (without history) on all of them."""
    right, two, wrong = "a " * 20, "x x " + "a " * 18, "x " * 20
    return run(
        full_prefill(right)
        + arm_lines("p", {"chronological": right, "reversed": right}, right, right)
        + "\n"
        + arm_lines("q", {"chronological": right, "reversed": two}, wrong, right)
    )


def test_every_difference_of_policies_tells_the_smallest_that_it_could_have_seen():
    figures = analyse(discordant_runs()).figures
    differences = select(figures, "fidelity_difference")
    smallest = select(figures, "smallest_difference")
    assert [(f.policy, f.order, f.control, f.n) for f in smallest] == [
        (f.policy, f.order, f.control, f.n) for f in differences
    ]
    assert [f.value for f in smallest] == [power.smallest_difference(20, share) for share in (0, 0.1, 1)]
    assert smallest[0].test == "exact McNemar, power 80 %"


def test_requests_for_points_are_for_the_order_with_most_discordant_requests():
    figures = analyse(discordant_runs()).figures
    for points in POINTS:
        (found,) = select(figures, requests_metric(points))
        assert (found.policy, found.order, found.control, found.n) == ("p - q", "reversed", "none", 20)
        assert found.value == power.requests_needed(points / 100, 0.1)
    assert [requests_metric(points) for points in POINTS][:2] == ["requests_for_1_point", "requests_for_2_points"]


def test_overlapping_requests_see_less_and_more_of_them_are_needed():
    built = discordant_runs()
    requests = run(full_prefill("a " * 20), documents=rolling(20, 4)).table("requests")
    figures = analyse(replace(built, tables=built.tables | {"requests": requests})).figures
    assert select(figures, "smallest_difference")[1].value == power.smallest_difference(20, 0.1, 4)
    found = select(figures, "requests_for_5_points")[0]
    assert found.value == power.requests_needed(0.05, 0.1, 4)
    assert found.test.endswith("requests counted in blocks of 4, since their windows overlap")


def three_policies_with_an_expected_answer() -> BuiltRun:
    full = "a b c d e f"
    lines = [
        arm_lines(name, {"chronological": words, "reversed": full, "shuffle-1": words}, full, words)
        for name, words in (("p", full), ("q", "a b c d x x"), ("r", "x x x x x f"))
    ]
    control = f"\np reversed rounding : {full}"
    columns = rounded("p.reversed", "p.reversed.rounding")
    return run(full_prefill(full) + "\n".join(lines) + control, expected=full.split(), columns=columns)


def test_every_figure_is_described_and_nothing_else_is():
    of_a_baseline = {"fidelity_change", "variation_change"}
    emitted = {f.metric for f in analyse(three_policies_with_an_expected_answer()).figures}
    assert emitted | of_a_baseline == set(METRICS)
    assert not emitted & of_a_baseline


def test_empty_answers_of_full_prefill_are_counted():
    found = figure(run(clean("p", "_ b c !")), "empty_answers")
    assert (found.policy, found.value, found.n) == ("full-prefill", pytest.approx(1 / 3), 3)


def rolling(requests: int, window: int):
    return [[f"d{place}" for place in range(first, first + window)] for first in range(requests)]


def requests_of(documents):
    return run(full_prefill("a " * len(documents)), documents=documents).table("requests")


def test_the_overlap_of_a_rolling_window_is_its_length():
    assert stream_overlap(requests_of(rolling(40, 8))) == 8


def test_interleaved_windows_overlap_as_far_as_each_of_them():
    streams = (rolling(40, 8), [[f"other-{name}" for name in row] for row in rolling(40, 8)])
    assert stream_overlap(requests_of([row for pair in zip(*streams, strict=True) for row in pair])) == 8


def test_documents_that_recur_at_random_do_not_make_one_block_of_the_stream():
    generator = np.random.default_rng(0)
    drawn = [[f"d{index}" for index in generator.choice(200, 4, replace=False)] for _ in range(500)]
    assert 8 <= stream_overlap(requests_of(drawn)) <= 12


def test_a_document_twice_in_a_request_is_held_once():
    assert stream_overlap(requests_of([["a", "a", "a"], ["b", "b"]])) == 1


def test_requests_of_their_own_do_not_overlap():
    assert stream_overlap(requests_of([[f"d{index}"] for index in range(10)])) == 1
    assert stream_overlap(requests_of([[] for _ in range(10)])) == 1
    assert stream_overlap(TABLES["requests"].empty_table()) == 1


def test_overlap_needs_no_order_or_single_chunk_in_the_table():
    table = requests_of(rolling(40, 8))
    mixed = table.take(np.random.default_rng(0).permutation(40))
    assert stream_overlap(pa.concat_tables([mixed.slice(0, 7), mixed.slice(7, 20), mixed.slice(27)])) == 8


def test_an_overlapping_stream_is_resampled_in_blocks():
    lines = arm_lines("p", {"chronological": "a " * 100, "reversed": "a x " * 50}, "a " * 100, "a " * 100)
    built = run(full_prefill("a " * 100) + lines, documents=rolling(100, 8))
    assert "blocks of 8 requests" in figure(built, "answer_variation").test


def test_the_summary_table_has_its_schema_and_every_figure():
    audit = analyse(two_policies("a b c x", "a b x x"))
    assert audit.summary.schema == TABLES["summary"]
    assert audit.summary["metric"].to_pylist() == [f.metric for f in audit.figures]
    row = next(row for row in audit.summary.to_pylist() if row["metric"] == "fidelity_difference")
    assert (row["policy"], row["p_value"]) == ("p - q", 1.0)
    assert (row["discordant_left"], row["discordant_right"]) == (1, 0)
    assert audit.summary["discordant_left"][0].as_py() is None
    assert summary_table([]).schema == TABLES["summary"]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_bootstrap_follows_the_run_s_seed(seed):
    generator = random.Random(5)
    words = " ".join(generator.choice("ab") for _ in range(30))
    lines = arm_lines("p", {"chronological": "a " * 30, "reversed": words}, "a " * 30, "a " * 30)
    built = run(full_prefill("a " * 30) + lines, settings={"seed": seed})
    again = run(full_prefill("a " * 30) + lines, settings={"seed": seed})
    other = run(full_prefill("a " * 30) + lines, settings={"seed": 99})
    assert figure(built, "answer_variation") == figure(again, "answer_variation")
    assert figure(built, "answer_variation") != figure(other, "answer_variation")
