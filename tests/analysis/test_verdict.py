from dataclasses import replace
from typing import get_args

import numpy as np
import pyarrow as pa
import pytest
from audit_runs import BuiltRun, arm_lines, clean, full_prefill, rounded, run

from kvaudit.analysis import stats
from kvaudit.analysis.audit import analyse
from kvaudit.analysis.checks import OF_REFERENCE, OF_ROUNDING, OF_VARIATION, STANDING, Reason, ReasonCode
from kvaudit.analysis.compare import build_grid, compare
from kvaudit.analysis.findings import Finding, find
from kvaudit.analysis.gates import GateResult, Gates, NonInferiority
from kvaudit.analysis.limits import MAX_NOISE, MAX_RETRIED, Limits
from kvaudit.analysis.verdict import EXIT_CODES, Verdict, decide
from kvaudit.errors import UsageError
from kvaudit.reports.words.findings import details_beside_line, finding_details, finding_line
from kvaudit.schema import TABLES

WORDS = "a b c d"
FLIPPED = "w x y d"
"""So many flips that run-to-run noise is ruled out."""


def damaged(chronological: str = WORDS, other: str = "a x c d", reset: str = WORDS, repeat: str | None = None) -> str:
    return full_prefill(WORDS) + arm_lines(
        "p", {"chronological": chronological, "reversed": other}, reset, repeat or chronological
    )


def finding(built: BuiltRun, policy: str = "p") -> Finding:
    grid = build_grid(built.table("observations"), built.table("requests"), built.arms())
    settings = built.manifest["settings"]
    limits = Limits(settings.get("max_noise", MAX_NOISE), settings.get("max_retried", MAX_RETRIED))
    (found,) = [found for found in find(grid, compare(grid), limits) if found.policy == policy]
    return found


def reasons(built: BuiltRun) -> dict[str, Reason]:
    found = finding(built)
    assert (found.seen == "inconclusive") == bool(found.reasons)
    return {reason.code: reason for reason in found.reasons}


def verdict(built: BuiltRun, **gates) -> Verdict:
    return analyse(built, Gates(**gates)).verdict


def healthy(policy: str = "p", n: int = 4) -> BuiltRun:
    return run(clean(policy, " ".join(f"w{index}" for index in range(n))))


# Findings


def test_equal_answers_in_every_order_are_none_seen_with_what_could_have_been_seen():
    found = finding(healthy())
    assert (found.seen, found.reasons, found.flipped, found.compared) == ("none-seen", (), 0, 4)
    assert found.smallest_visible == pytest.approx(1 - 0.05 ** (1 / 4))


def test_an_answer_that_differs_between_orders_is_history():
    found = finding(run(damaged()))
    assert (found.seen, found.flipped, found.examples) == ("history-sensitive", 1, ("r1",))
    assert (found.own_losses, found.reset_compared) == (0, 4)
    assert found.chance_of_reproducing == pytest.approx(1 / 3)
    assert (found.repeat_losses, found.repeat_compared) == (0, 4)


@pytest.mark.parametrize("reusable", [0, 60])
def test_a_reset_control_that_reuses_nothing_tells_no_own_error(reusable):
    def columns(planned, index):
        return {"reused_tokens": 0, "reusable_tokens": reusable} if planned.control == "reset" else {}

    built = run(damaged(other=FLIPPED), columns=columns)
    found = finding(built)
    audit = analyse(built, Gates())
    told = " ".join(finding_details(audit.findings[0]))
    assert found.reset_reuses == bool(reusable)
    assert ("is history" in told, "cannot be told apart" in told) == (bool(reusable), not reusable)
    assert any(figure.metric == "history_loss" for figure in audit.figures) == bool(reusable)


def test_a_policy_that_is_wrong_alike_in_every_order_has_no_history():
    found = finding(run(damaged("a x c d", "a x c d", "a x c d")))
    assert (found.seen, found.own_losses) == ("none-seen", 1)


def test_only_the_sensitive_policy_is_called_so():
    built = run(damaged() + "\n" + arm_lines("q", {"chronological": WORDS, "reversed": WORDS}, WORDS, WORDS))
    assert [finding(built, name).seen for name in "pq"] == ["history-sensitive", "none-seen"]


# Reasons: each keeps the audit from a conclusion, alone and with its numbers


def alone(built: BuiltRun, code: str) -> Reason:
    found = reasons(built)
    assert list(found) == [code]
    return found[code]


def test_a_repeat_that_does_not_reproduce():
    reason = alone(run(damaged(repeat="a b c x")), "repeat-differs")
    assert (reason.count, reason.total, reason.limit) == (1, 4, 0)


def test_a_full_prefill_whose_answers_are_all_empty_shows_nothing():
    empty = run(clean("p", "_ _ _ _"))
    reason = alone(empty, "answers-empty")
    assert (reason.count, reason.total) == (4, 4)
    assert verdict(empty, max_variation=0.9).outcome == "inconclusive"
    assert alone(empty.with_rows(lambda row: row | {"answer_text": None}), "answers-empty")
    assert alone(empty.with_rows(lambda row: row | {"answer_ids": None}), "answers-empty")
    assert alone(run(clean("p", "_ _ _ d")), "answers-empty").count == 3
    assert finding(run(clean("p", "_ _ c d"))).seen == "none-seen"


def test_a_full_prefill_that_disagrees_with_itself():
    built = run(full_prefill(WORDS, "a b c x") + damaged().split("\n", 2)[2])
    reason = alone(built, "noise-floor")
    assert (reason.count, reason.total, reason.limit) == (1, 4, 0)


def noisy(noise: int, repeat: int, flipped: int, limit: float, n: int = 100) -> BuiltRun:
    """Of n requests, how many a second full prefill, the repeat control and the other order answer differently."""
    words, changed = [f"w{index}" for index in range(n)], [f"x{index}" for index in range(n)]

    def some(count: int) -> str:
        return " ".join(changed[:count] + words[count:])

    lines = arm_lines("p", {"chronological": some(0), "reversed": some(flipped)}, some(0), some(repeat))
    return run(full_prefill(some(0), some(noise)) + lines, settings={"max_noise": limit})


@pytest.mark.parametrize(("noise", "repeat", "code"), [(2, 0, "noise-floor"), (0, 2, "repeat-differs")])
def test_the_noise_limit_is_a_share_for_full_prefill_and_the_repeat_alike(noise, repeat, code):
    assert finding(noisy(noise, repeat, 0, limit=0.02)).seen == "none-seen"
    assert finding(noisy(noise, repeat, 50, limit=0.02)).seen == "history-sensitive"
    assert alone(noisy(noise, repeat, 50, limit=0.019), code).limit == 0.019


@pytest.mark.parametrize(("noise", "repeat"), [(2, 0), (0, 2), (1, 2)])
def test_history_is_claimed_only_beyond_what_tolerated_noise_explains(noise, repeat):
    # The Wilson upper bound of 2 in 100 is 7.0 %.
    reason = alone(noisy(noise, repeat, 7, limit=0.02), "within-noise")
    assert (reason.count, reason.total, reason.limit) == (7, 100, pytest.approx(0.0700, abs=1e-4))
    assert finding(noisy(noise, repeat, 8, limit=0.02)).seen == "history-sensitive"
    assert finding(noisy(0, 0, 1, limit=0.02)).seen == "history-sensitive"


def test_every_further_order_may_be_noise_once():
    words = [f"w{index}" for index in range(100)]
    some = " ".join(["x"] * 20 + words[20:])
    orders = {"chronological": " ".join(words), "reversed": some} | dict.fromkeys(("o1", "o2", "o3"), " ".join(words))
    repeat = " ".join(["y", "y", *words[2:]])
    lines = arm_lines("p", orders, " ".join(words), repeat)
    reason = alone(run(full_prefill(" ".join(words)) + lines, settings={"max_noise": 0.02}), "within-noise")
    assert reason.limit == pytest.approx(4 * 0.0700, abs=4e-4)


def test_an_unfinished_arm():
    reason = alone(run(damaged()).unfinished("p.chronological.reset"), "arms-unfinished")
    assert (reason.count, reason.total, reason.names) == (1, 4, ("p.chronological.reset",))


def test_an_unfinished_full_prefill_leaves_nothing_to_compare_with():
    found = reasons(run(damaged()).unfinished("full-prefill.chronological"))
    assert set(found) == {"arms-unfinished", "nothing-compared"}
    assert found["nothing-compared"].names == ("reference", "noise")


@pytest.mark.parametrize(
    ("lost", "code", "names"),
    [
        ("p chronological reset", "control-missing", ("reset",)),
        ("full-prefill chronological repeat", "noise-floor-missing", ()),
    ],
)
def test_an_arm_that_was_never_planned(lost, code, names):
    text = "\n".join(line for line in damaged().splitlines() if not line.startswith(lost))
    assert reasons(run(text))[code].names == names


def test_a_missing_repeat_is_told_as_a_missing_control():
    text = "\n".join(line for line in damaged().splitlines() if "p chronological repeat" not in line)
    assert reasons(run(text))["control-missing"].names == ("repeat",)


def test_a_missing_reference():
    text = "\n".join(line for line in damaged().splitlines() if not line.startswith("full-prefill"))
    assert {"reference-missing", "noise-floor-missing", "nothing-compared"} <= set(reasons(run(text)))


def test_errors():
    reason = alone(run(damaged(other="a ! c d")), "errors")
    assert (reason.count, reason.total, reason.names) == (1, 16, ("p.reversed",))


def test_an_answer_that_is_neither_ids_nor_text_is_an_error():
    built = healthy().with_rows(
        lambda row: row | ({"answer_ids": None, "answer_text": None} if row["order"] == "reversed" else {})
    )
    assert set(reasons(built)) == {"errors", "nothing-compared"}


def test_requests_without_observation():
    reason = alone(run(damaged(other="a - c d")), "requests-missing")
    assert (reason.count, reason.names) == (1, ("p.reversed",))


def test_duplicates():
    built = run(damaged())
    table = built.table("observations")
    again = pa.concat_tables([table, table.slice(len(table) - 1)])
    reason = alone(replace(built, tables={**built.tables, "observations": again}), "duplicates")
    assert (reason.count, reason.names) == (1, ("p.chronological.repeat",))


def test_rows_that_nobody_planned():
    built = run(damaged()).with_rows(lambda row: row | ({"arm_id": "x"} if row["control"] == "reset" else {}))
    assert reasons(built)["unplanned-rows"].count == 4


def test_fewer_than_two_orders():
    built = run(full_prefill(WORDS) + arm_lines("p", {"chronological": WORDS}, WORDS, WORDS))
    assert alone(built, "too-few-orders").count == 1


def test_nothing_reused_in_any_order():
    built = healthy().with_rows(lambda row: row | {"reused_tokens": 0})
    assert alone(built, "nothing-reused")
    one = healthy().with_rows(
        lambda row: row | {"reused_tokens": 5 if row["order"] == "reversed" and row["position"] == 2 else 0}
    )
    assert finding(one).seen == "none-seen"


def test_reuse_in_the_controls_alone_is_no_history():
    built = healthy().with_rows(lambda row: row | ({"reused_tokens": 0} if row["control"] != "repeat" else {}))
    assert alone(built, "nothing-reused")


def test_an_engine_that_does_not_tell_reuse():
    built = healthy().with_rows(lambda row: row | ({"reused_tokens": None} if row["policy"] == "p" else {}))
    assert alone(built, "reuse-unknown")


def test_full_prefill_that_does_not_tell_whether_it_reused():
    built = healthy().with_rows(lambda row: row | ({"reused_tokens": None} if row["policy"] == "full-prefill" else {}))
    assert alone(built, "reference-unverified").count == 4


def test_requests_that_were_sent_again():
    built = healthy().with_rows(lambda row: row | {"attempts": 2 if at(row, first=True, control="repeat") else 1})
    reason = alone(built, "retried")
    assert (reason.count, reason.total, reason.limit, reason.names) == (1, 4, 0.01, ("p.chronological.repeat",))
    assert not finding(replace(built, manifest={"settings": {"max_retried": 0.25}})).reasons
    assert not finding(healthy().with_rows(lambda row: row | {"attempts": 1})).reasons


def test_full_prefill_that_reused():
    built = healthy().with_rows(lambda row: row | ({"reused_tokens": 3} if row["policy"] == "full-prefill" else {}))
    assert alone(built, "reference-reused").count == 4


def test_a_budget_that_was_missed():
    built = healthy().with_rows(lambda row: row | ({"recomputed_tokens": 8} if row["control"] == "reset" else {}))
    reason = alone(built, "budget-missed")
    assert (reason.count, reason.total, reason.names) == (4, 16, ("p.chronological.reset",))


# The empty cache: verified by no entry or no hit, never assumed


def at(row, *, first: bool = False, control: str = "none") -> bool:
    return row["policy"] == "p" and row["control"] == control and (not first or row["position"] == 0)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"cache_entries_before": 2}, "cache-not-empty"),
        ({"first_reused_tokens": 5, "cache_entries_before": None}, "cache-not-empty"),
        ({"first_reused_tokens": 5, "cache_entries_before": 0}, "cache-not-empty"),
        ({"first_reused_tokens": 5, "reused_tokens": 60, "prelude_reused_tokens": 5}, "cache-not-empty"),
        ({"first_reused_tokens": None, "cache_entries_before": None}, "cache-unverified"),
        ({"first_reused_tokens": 0, "reused_tokens": 60, "prelude_reused_tokens": 40}, None),
        ({"first_reused_tokens": 0, "cache_entries_before": None}, None),
        ({"first_reused_tokens": None, "cache_entries_before": 0}, None),
    ],
)
def test_the_first_request_of_an_arm_shows_an_empty_cache(found, code):
    built = healthy().with_rows(lambda row: row | (found if at(row, first=True) else {}))
    if code is None:
        assert finding(built).seen == "none-seen"
    else:
        assert alone(built, code).names == ("p.chronological", "p.reversed")


def test_under_reset_every_request_shows_an_empty_cache():
    built = healthy().with_rows(
        lambda row: row | ({"first_reused_tokens": 7} if at(row, control="reset") and row["position"] == 2 else {})
    )
    reason = alone(built, "cache-not-empty")
    assert (reason.count, reason.names) == (1, ("p.chronological.reset",))


def test_nothing_is_said_of_a_reset_control_whose_cache_was_not_empty():
    sentence = "With the cache emptied before each request"
    full = healthy().with_rows(
        lambda row: row | ({"first_reused_tokens": 7} if at(row, control="reset") and row["position"] == 2 else {})
    )
    assert [sentence in " ".join(finding_details(finding(built))) for built in (healthy(), full)] == [True, False]


def test_under_reset_a_prelude_may_be_reused():
    built = healthy().with_rows(
        lambda row: row | ({"reused_tokens": 7, "prelude_reused_tokens": 7} if at(row, control="reset") else {})
    )
    assert finding(built).seen == "none-seen"


def cold_and_different(row):
    """Nothing was cached, nothing came before, and yet the answer is another one."""
    cold = {"reused_tokens": 0, "reusable_tokens": 0, "prelude_reused_tokens": None}
    return cold | {"answer_ids": [9, 9], "answer_text": "another"}


def test_what_nothing_was_cached_of_is_full_prefill():
    cold = healthy().with_rows(
        lambda row: row | (cold_and_different(row) if at(row, control="reset") and row["position"] < 2 else {})
    )
    assert alone(cold, "cold-differs").count == 2
    reused = healthy().with_rows(
        lambda row: row | (cold_and_different(row) | {"reused_tokens": 5} if at(row, control="reset") else {})
    )
    assert finding(reused).seen == "none-seen"


def test_a_reference_in_doubt_takes_nothing_from_a_change_with_the_order():
    """Orders are held against each other; withheld is what is held against full prefill."""
    built = run(damaged(other=FLIPPED)).with_rows(
        lambda row: row | (cold_and_different(row) if at(row, control="reset") and row["position"] == 0 else {})
    )
    found = finding(built)
    assert (found.seen, [reason.code for reason in found.reasons]) == ("history-sensitive", ["cold-differs"])
    assert only(verdict(built, max_variation=0.2)).outcome == "fail"
    doubted = only(verdict(built, min_fidelity=0.9))
    assert (doubted.outcome, doubted.why) == ("inconclusive", "reference-doubtful")
    audit = analyse(built)
    assert finding_line(audit.findings[0], audit.figures).endswith("Full prefill's answers are in doubt.")
    assert "of which nothing was cached got another answer" in " ".join(details_beside_line(audit.findings[0]))


def test_noise_that_may_be_a_change_with_the_order_is_no_excuse_for_low_fidelity():
    lines = damaged("a x y z", "a x y w").replace("p ", "as-served ")
    found = finding(run(lines), "as-served")
    assert (found.seen, [reason.code for reason in found.reasons]) == ("inconclusive", ["noise-possible"])
    assert only(verdict(run(lines), min_fidelity=0.9)).outcome == "fail"
    assert only(verdict(run(lines), max_variation=0.1)).outcome == "inconclusive"


def test_repeats_of_every_order_rule_noise_out_sooner():
    """The one request that changed did so in two of five orders; their repeats are the only ones to say so again."""
    orders = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")
    answers = dict(zip(orders, [WORDS, WORDS, WORDS, "a x c d", "a x c d"], strict=True))
    again = "\n".join(f"as-served {order} repeat : {words}" for order, words in list(answers.items())[1:])
    once = full_prefill(WORDS) + arm_lines("as-served", answers, WORDS, WORDS)
    assert finding(run(once), "as-served").seen == "inconclusive"
    found = finding(run(f"{once}\n{again}"), "as-served")
    assert (found.seen, found.repeat_compared) == ("history-sensitive", 20)
    assert found.chance_of_reproducing == pytest.approx(1 / 21)


def test_an_arm_without_a_first_request_is_not_verified():
    built = healthy().with_rows(lambda row: row | {"position": row["position"] + 1})
    assert reasons(built)["cache-unverified"].count == 3


# Gates


def test_no_gates_and_a_conclusive_audit_pass_silently():
    assert (verdict(healthy()).outcome, verdict(healthy()).exit_code) == ("no gates", 0)
    assert verdict(run(damaged())).outcome == "no gates"


def test_no_gates_and_an_inconclusive_finding_are_inconclusive():
    found = verdict(run(damaged(repeat="a b c x")))
    assert (found.outcome, found.exit_code) == ("inconclusive", 4)


def test_nothing_audited_is_never_a_pass():
    assert verdict(run(full_prefill(WORDS))).outcome == "inconclusive"
    assert verdict(run(full_prefill(WORDS)), min_fidelity=0.5).outcome == "inconclusive"


def only(found: Verdict) -> GateResult:
    (result,) = found.gates
    return result


def test_a_broken_limit_fails_in_the_worst_order():
    found = verdict(run(damaged("a b c x", "x x x d")), min_fidelity=0.5)
    result = only(found)
    assert (found.outcome, found.exit_code, result.why) == ("fail", 1, "broken")
    assert (result.value, result.order, result.n) == (0.25, "reversed", 4)


def test_a_limit_that_is_only_met_is_not_broken():
    assert verdict(run(damaged("a b c d", "a x c x")), min_fidelity=0.5).outcome == "inconclusive"


def test_a_limit_passes_when_its_bound_keeps_it():
    found = verdict(healthy(n=60), min_fidelity=0.93, max_variation=0.07)
    assert (found.outcome, found.exit_code) == ("pass", 0)
    assert [result.why for result in found.gates] == ["kept", "kept"]


def test_without_power_a_gate_says_how_many_requests_it_needs():
    found = verdict(healthy(n=20), max_variation=0.05)
    result = only(found)
    assert (found.outcome, found.exit_code, result.why) == ("inconclusive", 4, "no-power")
    assert verdict(healthy(n=result.needed), max_variation=0.05).outcome == "pass"
    assert verdict(healthy(n=result.needed - 1), max_variation=0.05).outcome == "inconclusive"


def rolling(n: int, window: int = 3, wrong: int = 0) -> BuiltRun:
    words = [f"w{index}" for index in range(n)]
    answers = " ".join(["x"] * wrong + words[wrong:])
    lines = arm_lines("p", {"chronological": answers, "reversed": answers}, answers, answers)
    documents = [[f"d{place}" for place in range(first, first + window)] for first in range(n)]
    return run(full_prefill(" ".join(words)) + lines, documents=documents)


def test_requests_whose_windows_overlap_count_in_blocks_in_every_bound():
    (found,) = analyse(rolling(80)).findings
    assert (found.overlap, found.block) == (3, 3)
    assert found.smallest_visible == pytest.approx(1 - 0.05 ** (1 / 26))
    result = only(verdict(rolling(80), max_variation=0.05))
    assert (result.why, result.bound, result.overlap) == ("no-power", pytest.approx(1 - 0.025 ** (1 / 26)), 3)
    assert result.needed == 3 * 72
    assert verdict(rolling(result.needed), max_variation=0.05).outcome == "pass"
    assert verdict(rolling(result.needed - 1), max_variation=0.05).outcome == "inconclusive"


def test_a_fidelity_gate_counts_blocks():
    result = only(verdict(rolling(90, wrong=9), min_fidelity=0.8))
    assert (result.why, result.n) == ("no-power", 90)
    assert result.bound == pytest.approx(stats.wilson(27, 30).low)
    assert result.needed is not None
    assert stats.wilson(0.9 * result.needed, result.needed, 3).low >= 0.8
    assert stats.wilson(0.9 * (result.needed - 3), result.needed - 3, 3).low < 0.8
    apart = run(clean("p", " ".join(f"w{index}" for index in range(90))))
    assert only(verdict(apart, min_fidelity=0.95)).outcome == "pass"
    assert only(verdict(rolling(90), min_fidelity=0.95)).outcome == "inconclusive"


def test_a_variation_above_its_limit_fails():
    result = only(verdict(run(damaged(other=FLIPPED)), max_variation=0.7))
    assert (result.outcome, result.why, result.value) == ("fail", "broken", 0.75)


def test_so_few_flips_that_noise_is_not_ruled_out_do_not_fail():
    """Three of three runs, two of them alike: that the alike ones are the repeat's pair is luck, one time in three."""
    result = only(verdict(run(damaged()), max_variation=0.2))
    assert (result.outcome, result.why, result.value) == ("inconclusive", "noise-possible", 0.25)
    assert verdict(run(damaged()), max_variation=0.2).outcome == "inconclusive"


def both_policies() -> BuiltRun:
    return run(
        damaged(other=FLIPPED) + "\n" + arm_lines("q", {"chronological": WORDS, "reversed": WORDS}, WORDS, WORDS)
    )


def test_gates_hold_every_policy_unless_some_are_named():
    assert verdict(both_policies(), max_variation=0.2).outcome == "fail"
    assert [result.policy for result in verdict(both_policies(), max_variation=0.2).gates] == ["p", "q"]
    assert [result.policy for result in verdict(both_policies(), max_variation=0.7, policies=("q",)).gates] == ["q"]
    assert verdict(both_policies(), max_variation=0.7, policies=("q",)).outcome == "pass"


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match=r"'r'.*p, q"):
        verdict(both_policies(), max_variation=0.2, policies=("r",))


def test_a_fail_wins_over_another_policy_s_doubt():
    clean_but_noisy = arm_lines("q", {"chronological": WORDS, "reversed": WORDS}, WORDS, "x x x x")
    built = run(damaged(other=FLIPPED) + "\n" + clean_but_noisy)
    assert verdict(built, max_variation=0.2).outcome == "fail"
    assert verdict(built, max_variation=0.9).outcome == "inconclusive"


@pytest.mark.parametrize("code", get_args(ReasonCode))
def test_a_doubt_never_passes_and_only_standing_doubts_can_fail(code):
    audit = analyse(healthy(n=60))
    (good,) = audit.findings
    doubtful = replace(good, seen="inconclusive", reasons=(Reason(code),))
    assert decide([doubtful], audit.figures, Gates(min_fidelity=0.5)).outcome == "inconclusive"
    broken = analyse(run(damaged("x x x x", FLIPPED))).figures
    outcome = decide([doubtful], broken, Gates(min_fidelity=0.5)).outcome
    assert outcome == ("fail" if code in STANDING | OF_ROUNDING | OF_VARIATION else "inconclusive")
    outcome = decide([doubtful], broken, Gates(max_variation=0.2)).outcome
    assert outcome == ("fail" if code in STANDING | OF_REFERENCE else "inconclusive")


REVERSED = ("p.reversed", "p.reversed.rounding")
"""The arms that rounding touches below."""


def touched(reversed_: str, control: str, chronological: str = WORDS) -> BuiltRun:
    """Rounding touched the reversed order."""
    lines = damaged(chronological, reversed_) + f"\np reversed rounding : {control}"
    return run(lines, columns=rounded(*REVERSED))


def test_rounding_that_changes_nothing_does_not_matter():
    lines = damaged(WORDS, FLIPPED) + f"\np reversed rounding : {FLIPPED}"

    def columns(moved: float):
        return lambda planned, index: {
            "rounding_tokens": int(planned.arm_id in REVERSED),
            "reference_logprob": -2.0 - (moved if planned.control == "rounding" else 0),
        }

    immaterial, material = (finding(run(lines, columns=columns(moved))) for moved in (1e-5, 0.01))
    assert (immaterial.seen, immaterial.rounding_matters, immaterial.touched) == ("history-sensitive", False, ())
    assert "That does not matter here" in " ".join(finding_details(immaterial))
    assert (material.rounding_matters, material.touched) == (True, ("reversed",))
    assert material.seen == "inconclusive"


def test_orders_that_rounding_touched_more_than_any_control_prove_nothing():
    lines = full_prefill(WORDS) + arm_lines(
        "p", {"chronological": WORDS, "reversed": WORDS, "shuffle-1": FLIPPED}, WORDS, WORDS
    )

    def decided(planned, index):
        most = {"shuffle-1": 4, "reversed": 1}.get(planned.order, 0)
        return {"rounding_tokens": int(index < most)}

    found = finding(run(f"{lines}\np reversed rounding : {WORDS}", columns=decided))
    assert (found.rounding_matters, found.touched) == (True, ("reversed", "shuffle-1"))


def test_what_rounding_may_explain_breaks_no_limit():
    built = touched(FLIPPED, WORDS)
    assert reasons(built).keys() == {"within-rounding"}
    assert verdict(built, max_variation=0.2).outcome == "inconclusive"
    assert verdict(built, min_fidelity=0.9).outcome == "inconclusive"


def test_an_order_that_rounding_did_not_touch_breaks_a_limit_all_the_same():
    built = touched("w x y d", "a b c d", chronological=FLIPPED)
    (gate,) = verdict(built, min_fidelity=0.9).gates
    assert (gate.outcome, gate.why, gate.value) == ("fail", "broken", 0.25)


def test_an_order_that_is_as_wrong_under_its_rounding_control_breaks_a_limit():
    assert verdict(touched(FLIPPED, "w b y d"), min_fidelity=0.9).gates[0].outcome == "fail"


def untouched_in_part(reversed_: str, control: str, touched_from: int) -> BuiltRun:
    """Requests are served backwards: those from this one on were served before rounding touched the order."""
    count = len(reversed_.split())
    chronological = " ".join(f"w{index}" for index in range(count))
    lines = full_prefill(chronological) + arm_lines(
        "p", {"chronological": chronological, "reversed": reversed_}, chronological, chronological
    )
    built = run(lines + f"\np reversed rounding : {control}", columns=lambda planned, index: {"rounding_tokens": 0})
    return built.with_rows(
        lambda row: (
            row | {"rounding_tokens": int(row["arm_id"] in REVERSED and row["position"] == count - touched_from)}
        )
    )


def test_one_flip_that_is_proven_does_not_prove_those_that_rounding_may_explain():
    same = [f"w{index}" for index in range(60)]
    mostly_rounding = ["x"] * 30 + same[30:59] + ["y"]
    built = untouched_in_part(" ".join(mostly_rounding), " ".join(same), 40)
    found = finding(built)
    assert (found.seen, found.flipped, found.flipped_untouched) == ("history-sensitive", 31, 1)
    (gate,) = verdict(built, max_variation=0.2).gates
    assert (gate.outcome, gate.why) == ("inconclusive", "rounding-possible")
    assert verdict(built, max_variation=0.01).gates[0].outcome == "fail"


def test_a_limit_that_the_rounding_control_breaks_is_not_kept():
    same = [f"w{index}" for index in range(400)]
    one_flip = [*same[:399], "y"]
    control = ["x"] * 200 + one_flip[200:]
    built = untouched_in_part(" ".join(one_flip), " ".join(control), 300)
    assert finding(built).flipped_untouched == 1
    (gate,) = verdict(built, max_variation=0.05).gates
    assert (gate.outcome, gate.why) == ("inconclusive", "rounding-possible")
    held = untouched_in_part(" ".join(one_flip), " ".join(one_flip), 300)
    assert verdict(held, max_variation=0.05).outcome == "pass"


def test_a_paired_gate_fails_on_no_order_that_rounding_touched():
    same = " ".join(f"w{index}" for index in range(60))
    lines = full_prefill(same) + arm_lines("q", {"chronological": same, "reversed": same}, same, same) + "\n"
    lines += arm_lines("p", {"chronological": same, "reversed": "x " * 40 + " ".join(same.split()[40:])}, same, same)
    lines += f"\np reversed rounding : {same}"
    gates = Gates(non_inferior=(NonInferiority("p", "q", 0.05),))
    clear = analyse(run(lines, columns=lambda planned, index: {"rounding_tokens": 0}), gates).verdict.gates[0]
    assert (clear.outcome, clear.why) == ("fail", "broken")
    doubtful = analyse(run(lines, columns=rounded(*REVERSED)), gates).verdict.gates[0]
    assert doubtful.outcome == "inconclusive"


@pytest.mark.parametrize("text", ["! ! ! !", "- - - -"])
def test_a_gate_without_a_value_is_inconclusive(text):
    found = verdict(run(damaged(text, text)), min_fidelity=0.5, max_variation=0.5)
    assert [result.outcome for result in found.gates] == ["inconclusive", "inconclusive"]
    assert found.outcome == "inconclusive"


@pytest.mark.parametrize("limit", [-0.1, 1.1, 95.0, float("nan")])
@pytest.mark.parametrize("name", ["min_fidelity", "max_variation"])
def test_a_limit_is_a_share(name, limit):
    with pytest.raises(UsageError, match="share"):
        Gates(**{name: limit})


def test_exit_codes_are_those_of_the_design():
    assert EXIT_CODES == {"pass": 0, "no gates": 0, "fail": 1, "inconclusive": 4}


# Audits of an engine without history


def history_free(seed: int, noise: float) -> BuiltRun:
    """The policy errs on its own, and any answer of any run changes at random with probability `noise`."""
    generator = np.random.default_rng(seed)
    n = int(generator.integers(5, 30))
    own = generator.random(n) < 0.2

    def words(errs: bool) -> str:
        changed = generator.random(n) < noise
        return " ".join(f"{index}{'x' * bool(errs and own[index])}{'n' * int(changed[index])}" for index in range(n))

    orders = {order: words(True) for order in ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")}
    return run(full_prefill(words(False), words(False)) + arm_lines("p", orders, words(True), words(True)))


@pytest.mark.slow
def test_audits_without_history_are_never_called_history_sensitive():
    seen = [finding(history_free(seed, noise)).seen for seed in range(100) for noise in (0.0, 0.2, 0.4)]
    assert seen.count("history-sensitive") == 0
    assert seen.count("none-seen") == 100


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_tolerated_noise_is_never_called_history(noise):
    """But for the runs in which no two runs of the same order happened to differ, it is told as noise."""
    found = []
    for seed in range(100):
        built = history_free(seed, noise)
        found.append(finding(replace(built, manifest={"settings": {"max_noise": 1.0}})))
    slipped = [f for f in found if f.seen == "history-sensitive"]
    assert all(not f.repeat_losses for f in slipped)
    assert all(f.chance_of_reproducing >= 0.05 for f in slipped)


def test_a_run_without_requests_is_inconclusive():
    built = BuiltRun(healthy().planned, {"requests": TABLES["requests"].empty_table()})
    audit = analyse(built)
    assert audit.verdict.outcome == "inconclusive"
    assert {reason.code for reason in audit.findings[0].reasons} >= {"nothing-compared", "cache-unverified"}


def test_the_bound_of_few_flips_is_not_below_that_of_none():
    """A bootstrap over few blocks can end below the exact bound: damage must not pass where a clean run cannot."""
    words = " ".join(f"w{index}" for index in range(16))
    flipped = " ".join(["x", *words.split()[1:]])
    built = run(
        full_prefill(words) + arm_lines("p", {"chronological": words, "reversed": flipped}, words, words),
        documents=[[f"d{place}" for place in range(first, first + 3)] for first in range(16)],
    )
    clean_bound = only(verdict(rolling(16), max_variation=0.25)).bound
    assert only(verdict(built, max_variation=0.25)).bound >= clean_bound
    assert verdict(built, max_variation=0.25).outcome == "inconclusive"
