import numpy as np
import pytest
from audit_runs import BuiltRun, arm_lines, full_prefill, run

from kvaudit.analysis.compare import build_grid
from kvaudit.analysis.costs import cost_figures
from kvaudit.analysis.figures import Figure, select


def built(columns=None) -> BuiltRun:
    lines = [
        arm_lines(name, {"chronological": "a b c d", "reversed": "a b c d"}, "a b c d", "a b c d")
        for name in ("p", "q")
    ]
    return run(full_prefill("a b c d") + "\n".join(lines), columns=columns)


def all_figures(columns=None) -> tuple[Figure, ...]:
    run = built(columns)
    return cost_figures(build_grid(run.table("observations"), run.table("requests"), run.arms()))


def figures(metric: str, columns=None, policy="p", order=None, control="none") -> list[Figure]:
    return select(all_figures(columns), metric, policy, order, control)


def test_ttft_leaves_out_the_first_request_of_each_arm():
    def columns(arm, index):
        warm_up = index == (0 if arm.order == "chronological" else 3)
        return {"ttft_ms": 10_000.0 if warm_up else {"p": 10.0 + index, "q": 7.0}.get(arm.policy, 50.0)}

    (median,) = figures("ttft_median", columns)
    # Chronological warms up on r0, reversed on r3: 11, 12, 13 and 10, 11, 12 are left.
    assert (median.value, median.n) == (11.5, 6)
    (p95,) = figures("ttft_p95", columns)
    assert p95.value == pytest.approx(np.quantile([10, 11, 11, 12, 12, 13], 0.95))
    (speedup,) = figures("ttft_speedup", columns)
    # A ratio needs the request warm on both sides: r0 warms up full prefill.
    assert (speedup.value, speedup.n) == (pytest.approx(np.median([50 / 11, 50 / 12, 50 / 13])), 3)
    (full,) = figures("ttft_median", columns, "full-prefill")
    assert (full.value, full.n) == (50, 3)


def test_a_request_counts_once_in_the_speed_up_however_many_orders_served_it():
    slow = {("chronological", 1), ("chronological", 2), ("reversed", 1)}

    def columns(arm, index):
        return {"ttft_ms": 100.0 if arm.policy != "p" else 100.0 if (arm.order, index) in slow else 10.0}

    (speedup,) = figures("ttft_speedup", columns)
    # r1: 1 and 1; r2: 1 and 10; r3: 10, warm in one order only.
    assert (speedup.value, speedup.n) == (5.5, 3)


def test_controls_do_not_enter_ttft():
    (median,) = figures("ttft_median", lambda arm, _: {"ttft_ms": 10.0 if arm.control == "none" else 999.0})
    assert median.value == 10


def test_an_engine_without_times_has_no_ttft():
    assert figures("ttft_median", lambda arm, _: {"ttft_ms": None}) == []
    assert figures("ttft_speedup", lambda arm, _: {"ttft_ms": 0.0}) == []


def test_divergence_is_told_per_order_and_for_the_reset_control():
    def columns(arm, index):
        return {"kl": float(index), "reference_logprob": -1.0 if arm.order == "reversed" else None}

    values = [
        (figure.value, figure.n)
        for figure in figures("kl_mean", columns) + figures("kl_median", columns, order="reversed")
    ]
    assert values == [(1.5, 4), (1.5, 4), (1.5, 4)]
    assert [figure.order for figure in figures("reference_logprob_mean", columns)] == ["reversed"]
    assert len(figures("kl_mean", columns, control="reset")) == 1
    assert figures("kl_mean", columns, control="repeat") == []


def test_an_infinite_divergence_does_not_hide_the_others():
    (figure,) = figures("kl_mean", lambda arm, index: {"kl": float("inf") if index else 0.5}, order="reversed")
    assert (figure.value, figure.n) == (0.5, 1)


def test_selections_are_median_and_quartiles_over_requests_with_something_reusable():
    def columns(arm, index):
        return {"fragmentation": [100, 1, 2, 3][index], "reusable_tokens": 60 if index else 0}

    (figure,) = figures("fragmentation", columns, order="reversed")
    assert (figure.low, figure.value, figure.high, figure.n) == (1.5, 2, 2.5, 3)


def test_recomputed_tokens_are_totals_held_against_the_budget():
    def columns(arm, index):
        return {"recomputed_tokens": 9 - (arm.order == "reversed" and index == 2), "budget_k": 9}

    assert [figure.value for figure in figures("recomputed_tokens", columns)] == [36, 35]
    assert [figure.value for figure in figures("budget_tokens", columns)] == [36, 36]


def equality(columns) -> dict[str, float]:
    found = select(all_figures(columns), "recomputed_equal", control="none")
    return {figure.order: figure.value for figure in found}


def test_policies_of_one_budget_must_recompute_the_same_total():
    assert equality(None) == {"chronological": 1, "reversed": 1}

    def columns(arm, index):
        return {"recomputed_tokens": 10 if (arm.policy, arm.order, index) == ("q", "reversed", 1) else 9}

    assert equality(columns) == {"chronological": 1, "reversed": 0}


@pytest.mark.parametrize("k", [0, 60])
def test_policies_that_recompute_nothing_or_everything_are_not_held_against_the_others(k):
    assert equality(lambda arm, _: {"recomputed_tokens": k, "budget_k": k} if arm.policy == "q" else {}) == {}


def test_reuse_is_a_share_of_all_prompt_tokens():
    def columns(arm, index):
        return {"reused_tokens": 30 if index else 0, "prompt_tokens": 30 if index else 90}

    (figure,) = figures("reuse_share", columns, order="reversed")
    assert (figure.value, figure.n) == (0.5, 4)


def test_an_engine_that_shows_nothing_gives_no_figures():
    hidden = dict.fromkeys(
        ("kl", "fragmentation", "captured_deviation", "recomputed_tokens", "budget_k", "reused_tokens", "ttft_ms")
    )
    found = all_figures(lambda arm, _: hidden)
    names = {"kl_mean", "fragmentation", "captured_deviation", "recomputed_tokens", "reuse_share", "recomputed_equal"}
    assert not names & {figure.metric for figure in found}
