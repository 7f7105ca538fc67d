from typing import get_args

import pytest
from audit_runs import arm_lines, clean, full_prefill, rounded, run
from report_audits import audited

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.checks import Reason, ReasonCode
from kvaudit.analysis.figures import Figure
from kvaudit.reports.words.findings import finding_details, reason_sentence
from kvaudit.reports.words.gates import gate_sentence
from kvaudit.reports.words.numbers import interval, names, p_value, percent
from kvaudit.reports.words.verdict import headline


@pytest.mark.parametrize("code", get_args(ReasonCode))
def test_every_reason_has_a_sentence_with_its_numbers_and_names(code):
    sentence = reason_sentence(
        Reason(code, 3, 40, 0.05, ("reset", "repeat")[: 1 + (code != "nothing-compared")])
        if code != "nothing-compared"
        else Reason(code, names=("reference", "noise"))
    )
    assert sentence.endswith(".")
    assert "None" not in sentence
    assert "\n" not in sentence


def test_names_are_cut_and_harmless():
    assert names(["a", "b\x1b", "c", "d", "e"]) == r"a, b\x1b, c and 2 more"


@pytest.mark.parametrize(
    ("share", "shown"),
    [(None, "-"), (0, "0.0 %"), (1, "100.0 %"), (0.868, "86.8 %"), (0.0001, "<0.1 %"), (0.9999, ">99.9 %")],
)
def test_what_is_not_everything_never_reads_as_everything(share, shown):
    assert percent(share) == shown


@pytest.mark.parametrize(("p", "shown"), [(None, "-"), (0.2295, "0.23"), (0.004, "0.0040"), (1e-9, "<0.0001")])
def test_p_values(p, shown):
    assert p_value(p) == shown


def test_an_interval_without_bounds_is_a_dash():
    assert interval(Figure("fidelity", value=0.5)) == "-"


def test_the_headline_is_a_line_for_each_policy_and_the_verdict():
    built = run(
        clean("p") + "\n" + arm_lines("q", {"chronological": "a b c d", "reversed": "a x c d"}, "a b c d", "a b c d")
    )
    lines = headline(audited(built))
    assert lines[0].startswith("p: none seen. No answer differed between orders on 4 requests")
    assert "52.7 %" in lines[0]
    assert lines[1].startswith("q: history-sensitive. 1 of 4 requests changed with the order; answer variation 25.0 %")
    assert lines[2] == "Verdict: no gates (no limit is set; the findings stand; exit code 0)"


def test_the_headline_of_an_inconclusive_audit_says_why():
    lines = headline(audited(run(clean("p").replace("repeat : a b c d", "repeat : a b c x"))))
    assert lines[0] == (
        "p: inconclusive. Full prefill disagreed with itself on 1 of 4 requests; the limit is 0.0 %. "
        "(and 1 further reason)"
    )
    assert lines[1] == "Verdict: inconclusive (the audit cannot say; exit code 4)"


def test_the_headline_of_nothing():
    assert headline(audited(run(full_prefill("a b"))))[0] == "No policy was audited."


def gate_sentences(text: str, **gates) -> list[str]:
    return [gate_sentence(result) for result in audited(run(text), **gates).verdict.gates]


def test_gates_say_what_was_observed_and_what_is_missing():
    broken = full_prefill("a b") + arm_lines("p", {"chronological": "a b", "reversed": "x y"}, "a b", "a b")
    assert gate_sentences(broken, min_fidelity=0.9) == [
        "fail: p, fidelity at least 90 %; observed 0.0 % in the worst order (reversed), on 2 requests."
    ]
    (weak,) = gate_sentences(clean("p"), max_variation=0.05)
    assert weak.startswith("inconclusive: p, answer variation at most 5 %; observed 0.0 %, 95 % upper bound 60.2 %")
    assert weak.endswith("4 requests are too few; about 72 would be needed.")
    (never,) = gate_sentences(clean("p"), max_variation=0.0)
    assert never.endswith("no number of requests can show that the limit is kept at this value.")
    (kept,) = gate_sentences(clean("p"), max_variation=0.7)
    assert kept == "pass: p, answer variation at most 70 %; observed 0.0 %, 95 % upper bound 60.2 %."
    (doubt,) = gate_sentences(clean("p").replace("p reversed : a b c d", "p reversed : a b c !"), max_variation=0.7)
    assert doubt.endswith("but the finding is inconclusive.")


def test_a_loss_is_told_as_history_or_as_the_policy_s_own():
    text = full_prefill("a b") + arm_lines("p", {"chronological": "a b", "reversed": "a y"}, "{}", "a b")
    history, own = (audited(run(text.format(reset))).findings[0] for reset in ("a b", "a z"))
    assert "what is lost in the orders is history" in finding_details(history)[-1]
    assert "1 of 2 answers still differ" in finding_details(own)[-1]
    unchanged = finding_details(audited(run(clean("p"))).findings[0])[-1]
    assert unchanged.endswith("all 4 answers equal full prefill's.")


def reproduced(orders: dict[str, str], repeat: str = "a b c d e", **settings) -> str:
    full = "a b c d e"
    text = full_prefill(full) + arm_lines("p", {"chronological": full} | orders, full, repeat)
    return finding_details(audited(run(text, settings=settings)).findings[0])[0]


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ("a b c d x", "probability 0.33: such noise is not ruled out."),
        ("x y z d e", "probability 0.037: such noise is ruled out."),
    ],
)
def test_the_repeat_counts_for_as_much_as_it_shows(answers, end):
    sentence = reproduced({"reversed": answers})
    assert sentence.startswith("The repeat control reproduced every answer; if answers varied at random")
    assert sentence.endswith(end)


def test_a_repeat_that_differs_within_the_limit_is_not_said_to_reproduce():
    full = " ".join(f"w{index}" for index in range(60))
    repeat, other = "y" + full[2:], " ".join(["x"] * 60)
    text = full_prefill(full) + arm_lines("p", {"chronological": full, "reversed": other}, full, repeat)
    (finding,) = audited(run(text, settings={"max_noise": 0.1})).findings
    assert finding.seen == "history-sensitive"
    assert finding_details(finding)[0].startswith("The repeat control answered 1 of 60 requests differently")


def test_requests_that_are_counted_in_blocks_are_said_to_be():
    documents = [[f"d{first}", f"d{first + 1}"] for first in range(40)]
    audit = audited(run(clean("p", " ".join("a" * 40)), documents=documents), max_variation=0.05)
    counted = "(requests counted in blocks of 2, since their windows overlap)"
    assert counted in headline(audit)[0]
    assert counted in gate_sentence(audit.verdict.gates[0])


def rounding(control: str, touched: tuple[str, ...], reversed_: str = "w x c d"):
    built = run(
        full_prefill("a b c d")
        + arm_lines("token-topk", {"chronological": "a b c d", "reversed": reversed_}, "a b c d", "a b c d")
        + f"\ntoken-topk reversed rounding : {control}",
        columns=rounded(*touched),
    )
    (finding,) = analyse(built).findings
    return finding


def test_what_rounding_touched_nowhere_is_history():
    found = rounding("w x c d", ())
    assert found.seen == "history-sensitive"
    assert "Rounding decided none of its selections." in finding_details(found)


def test_what_rounding_may_explain_is_not_called_history():
    found = rounding("a b c d", ("token-topk.reversed", "token-topk.reversed.rounding"))
    assert (found.seen, [reason.code for reason in found.reasons]) == ("inconclusive", ["within-rounding"])
    details = " ".join(finding_details(found))
    assert (
        "Rounding decides which tokens are recomputed in every order that differs, and 2 of 4 answers change" in details
    )
    assert (
        "On 4 of 8 requests served, rounding chose a recomputed token; rounded otherwise, 2 of 4 answers change"
        in details
    )


def test_where_only_rounding_changes_an_answer_nothing_is_none_seen():
    found = rounding("w b c d", ("token-topk.reversed", "token-topk.reversed.rounding"), "a b c d")
    assert [reason.code for reason in found.reasons] == ["rounding-differs"]
    assert "No answer changed with the order, but 1 of 4 did" in finding_details(found)[0]
