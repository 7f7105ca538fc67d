import io
from collections import Counter

import pytest
from audit_runs import BuiltRun, arm_lines, clean, full_prefill, run
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree
from report_audits import audited, rendered, rich_run

from kvaudit.analysis.checks import STANDING
from kvaudit.reports import junit

SCHEMA = etree.RelaxNG(
    etree.fromstring("""
<grammar xmlns="http://relaxng.org/ns/structure/1.0"
         datatypeLibrary="http://www.w3.org/2001/XMLSchema-datatypes">
  <define name="counts">
    <attribute name="name"><text/></attribute>
    <attribute name="tests"><data type="nonNegativeInteger"/></attribute>
    <attribute name="failures"><data type="nonNegativeInteger"/></attribute>
    <attribute name="errors"><data type="nonNegativeInteger"/></attribute>
    <attribute name="skipped"><data type="nonNegativeInteger"/></attribute>
    <attribute name="time"><data type="decimal"/></attribute>
  </define>
  <define name="told">
    <attribute name="message"><data type="string"><param name="minLength">1</param></data></attribute>
    <attribute name="type"><data type="token"/></attribute>
    <text/>
  </define>
  <start>
    <element name="testsuites">
      <ref name="counts"/>
      <oneOrMore>
        <element name="testsuite">
          <ref name="counts"/>
          <zeroOrMore>
            <element name="testcase">
              <attribute name="name"><text/></attribute>
              <attribute name="classname"><text/></attribute>
              <optional><attribute name="time"><data type="decimal"/></attribute></optional>
              <optional>
                <choice>
                  <element name="failure"><ref name="told"/></element>
                  <element name="error"><ref name="told"/></element>
                  <element name="skipped">
                    <attribute name="message"><data type="string"><param name="minLength">1</param></data></attribute>
                  </element>
                  <element name="system-out"><text/></element>
                </choice>
              </optional>
            </element>
          </zeroOrMore>
        </element>
      </oneOrMore>
    </element>
  </start>
</grammar>""")
)


def parsed(audit):
    text = rendered(junit.render, audit)
    root = etree.fromstring(text.encode())
    SCHEMA.assertValid(root)
    check_counts(root)
    return root


def check_counts(root):
    for place in (root, *root):
        elements = Counter(element.tag for element in place.iter())
        told = {name: int(place.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        counted = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
        assert told == {name: elements[tag] for name, tag in counted.items()}, place.get("name")


def suite(root, name):
    return next(place for place in root if place.get("name") == name)


def results(root, name) -> list[str]:
    """What became of the cases of a suite, in order."""
    return [case[0].tag if len(case) else "passed" for case in suite(root, name)]


def test_suites_are_the_verdict_and_every_arm_in_order():
    built = rich_run()
    root = parsed(audited(built, min_fidelity=0.5))
    assert [place.get("name") for place in root] == ["verdict", *(arm.arm_id for arm in built.arms())]
    assert {len(place) for place in root[1:]} == {16}
    assert [case.get("name") for case in root[1]] == [f"r{index}" for index in range(16)]


def test_classnames_are_policy_order_and_control():
    root = parsed(audited(run(clean("p"))))
    names = {place.get("name"): place[0].get("classname") for place in root[1:]}
    assert names["p.reversed"] == "p.reversed"
    assert names["p.chronological.reset"] == "p.chronological.reset"


def test_gates_and_findings_are_cases_of_the_verdict():
    text = full_prefill("a b") + "\n".join(
        [
            arm_lines("p", {"chronological": "a b", "reversed": "x y"}, "a b", "a b"),
            arm_lines("q", {"chronological": "a b", "reversed": "a b"}, "a b", "a x"),
            arm_lines("r", {"chronological": "a b", "reversed": "a b"}, "a b", "a b"),
        ]
    )
    audit = audited(run(text), min_fidelity=0.9)
    verdict = suite(parsed(audit), "verdict")
    assert [(case.get("classname"), case.get("name")) for case in verdict] == [
        ("verdict.verdict", "verdict"),
        ("verdict.gate", "p, fidelity at least 90 %"),
        ("verdict.gate", "q, fidelity at least 90 %"),
        ("verdict.gate", "r, fidelity at least 90 %"),
    ]
    assert [case[0].tag for case in verdict] == ["failure", "failure", "skipped", "skipped"]
    findings = verdict[0][0].get("message")
    assert "p: history-sensitive" in findings
    assert "The repeat control answered 1 of 2 requests differently" in findings
    assert "observed 0.0 % in the worst order (reversed)" in verdict[1][0].get("message")


@pytest.mark.parametrize(("limit", "tag"), [(0.9, "failure"), (0.5, "skipped"), (0.0, "system-out")])
def test_the_case_of_the_verdict_is_what_the_exit_code_is(limit, tag):
    lines = arm_lines("p", {"chronological": "a b c", "reversed": "a b x"}, "a b c", "a b c")
    audit = audited(run(full_prefill("a b c") + lines), min_fidelity=limit)
    verdict = suite(parsed(audit), "verdict")
    assert verdict[0][0].tag == tag
    assert {"failure": 1, "skipped": 4, "system-out": 0}[tag] == audit.verdict.exit_code


def test_no_policy_is_no_pass():
    verdict = suite(parsed(audited(run(full_prefill("a b")))), "verdict")
    assert [case[0].tag for case in verdict] == ["skipped"]


def test_a_differing_answer_fails_and_says_where_and_how_far():
    text = full_prefill("t b") + arm_lines("p", {"chronological": "t b", "reversed": "u b"}, "t b", "t b")
    built = run(text, texts={"t": "the price is 12 dollars", "u": "the price is 19 dollars"})
    root = parsed(audited(built))
    assert results(root, "p.reversed") == ["failure", "passed"]
    failure = suite(root, "p.reversed")[0][0]
    assert failure.get("message") == (
        "The answer differs from full prefill's, first difference at character 14, edit distance 1."
    )
    assert failure.text == "full prefill: the price is 12 dollars\nthis arm: the price is 19 dollars"


def test_the_token_of_the_first_difference_is_told_where_it_is_known():
    root = parsed(audited(rich_run()))
    messages = [failure.get("message") for arm in root[1:] for failure in arm.iter("failure")]
    assert messages
    assert all("first difference at token 2, first difference at character" in message for message in messages)


def test_same_text_of_other_tokens_still_fails():
    text = full_prefill("t b") + arm_lines("p", {"chronological": "t b", "reversed": "u b"}, "t b", "t b")
    root = parsed(audited(run(text, texts={"t": "same", "u": "same"})))
    failure = suite(root, "p.reversed")[0][0]
    assert failure.get("message") == "The answer differs from full prefill's, edit distance 0."


def test_an_engine_error_is_an_error_with_its_text_and_taints_the_rest():
    built = run(clean("p").replace("p reversed : a b c d", "p reversed : ! x c d"))
    built = built.with_rows(lambda row: row | {"error": row["error"] and "out of memory <\x00>"})
    root = parsed(audited(built))
    assert results(root, "p.reversed") == ["error", "failure", "skipped", "skipped"]
    error, _, skipped, _ = (case[0] for case in suite(root, "p.reversed"))
    assert error.get("message") == r"out of memory <\x00>"
    assert skipped.get("message") == "1 of 16 requests ended in an error or without an answer in p.reversed."


def test_an_answer_that_the_engine_did_not_give_is_an_error():
    built = run(clean("p", "a b")).with_rows(
        lambda row: row | ({"answer_text": None, "answer_ids": None} if row["policy"] == "p" else {})
    )
    root = parsed(audited(built))
    assert results(root, "p.reversed") == ["error", "error"]
    assert suite(root, "p.reversed")[0][0].get("message") == junit.NO_ANSWER


def test_a_difference_is_skipped_when_the_finding_has_a_reason_that_does_not_leave_it_standing():
    text = clean("p").replace("p reversed : a b c d", "p reversed : a x c d")
    root = parsed(audited(run(text.replace("p chronological repeat : a b c d", "p chronological repeat : a b c x"))))
    assert results(root, "p.reversed") == ["skipped"] * 4
    assert suite(root, "p.reversed")[1][0].get("message").startswith("The repeat control answered 1 of 4")


def test_unfinished_arms_are_skipped_and_there():
    built = run(clean("p")).unfinished("p.reversed")
    root = parsed(audited(built))
    assert results(root, "p.reversed") == ["skipped"] * 4
    assert {case[0].get("message") for case in suite(root, "p.reversed")} == {"The arm is not finished."}


def test_missing_observations_are_skipped():
    root = parsed(audited(run(clean("p").replace("p reversed : a b c d", "p reversed : a - c d"))))
    assert suite(root, "p.reversed")[1][0].get("message") == junit.SKIPPED[junit.MISSING]
    assert suite(root, "p.reversed")[0][0].get("message") != junit.SKIPPED[junit.MISSING]


def test_what_full_prefill_did_not_answer_is_not_compared():
    text = "full-prefill chronological : ! b\nfull-prefill chronological repeat : a b\n"
    text += arm_lines("p", {"chronological": "a b", "reversed": "a b"}, "a b", "a b")
    root = parsed(audited(run(text)))
    assert results(root, "full-prefill.chronological") == ["error", "skipped"]
    assert results(root, "full-prefill.chronological.repeat") == ["skipped", "passed"]
    assert suite(root, "p.reversed")[0][0].get("message") == junit.SKIPPED[junit.NO_REFERENCE]


def test_the_reference_itself_never_passes_and_its_repeat_is_held_against_it():
    root = parsed(audited(run(full_prefill("a b", "a x") + clean("p", "a b").partition("\n")[2].partition("\n")[2])))
    assert results(root, "full-prefill.chronological") == ["skipped", "skipped"]
    assert results(root, "full-prefill.chronological.repeat") == ["passed", "failure"]
    assert "edit distance 1" in suite(root, "full-prefill.chronological.repeat")[1][0].get("message")


def test_without_full_prefill_nothing_passes():
    text = arm_lines("p", {"chronological": "a b", "reversed": "a b"}, "a b", "a b")
    root = parsed(audited(run(text)))
    assert {case for place in root[1:] for case in results(root, place.get("name"))} == {"skipped"}


def test_times_are_seconds_and_left_out_where_unknown():
    built = run(clean("p", "a b"), columns=lambda arm, index: {"total_ms": 1500.0 if index else None})
    root = parsed(audited(built))
    assert [case.get("time") for case in suite(root, "p.reversed")] == [None, "1.500"]
    assert suite(root, "p.reversed").get("time") == "1.500"
    assert root.get("time") == "9.000"


def test_a_file_s_text_stream_is_enough():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="utf-8")
    text = full_prefill("t b") + arm_lines("p", {"chronological": "t b", "reversed": "u b"}, "t b", "t b")
    junit.render(audited(run(text, texts={"t": "é漢", "u": "ü"})), out)
    out.flush()
    root = etree.fromstring(raw.getvalue())
    assert "full prefill: é漢" in next(root[-3].iter("failure")).text


WORDS = st.sampled_from(["a", "a", "a", "b", "!", "-", "_"])


@st.composite
def any_run(draw) -> BuiltRun:
    def words() -> str:
        return " ".join(draw(st.lists(WORDS, min_size=3, max_size=3)))

    lines = full_prefill(words(), words()) + arm_lines(
        "p", {o: words() for o in ("chronological", "x")}, words(), "a a a"
    )
    built = run(lines)
    unfinished = draw(st.sampled_from([arm.arm_id for arm in built.arms()]))
    return built.unfinished(unfinished) if draw(st.integers(0, 4)) == 0 else built


@settings(max_examples=30, deadline=None)
@given(any_run())
def test_every_case_is_what_its_observation_says(built):
    audit = audited(built)
    root = parsed(audit)
    rows = {(row["arm_id"], row["request_id"]): row for row in built.table("observations").to_pylist()}
    (finding,) = audit.findings
    for arm in built.arms():
        for request, result in zip(audit.grid.request_ids.to_pylist(), results(root, arm.arm_id), strict=True):
            mine = rows.get((arm.arm_id, request))
            full = rows.get(("full-prefill.chronological", request))
            assert result == expected_result(arm, mine, full, finding), (arm.arm_id, request)


def expected_result(arm, mine, full, finding) -> str:
    reasons = {reason.code for reason in finding.reasons} if arm.policy == "p" else set()
    if not arm.finished or mine is None:
        return "skipped"
    if mine["error"]:
        return "error"
    if arm.arm_id == "full-prefill.chronological" or full is None or full["error"]:
        return "skipped"
    if (mine["answer_ids"], mine["answer_text"]) == (full["answer_ids"], full["answer_text"]):
        return "skipped" if reasons else "passed"
    return "failure" if reasons <= STANDING else "skipped"


def test_counts_stand_before_the_cases_are_written():
    """A reader that streams knows the totals from the first line on."""

    class Stream(io.StringIO):
        pieces = 0

        def write(self, text: str) -> int:
            self.pieces += 1
            return super().write(text)

    out = Stream()
    junit.render(audited(rich_run()), out)
    assert out.pieces > 16 * 16
    assert out.getvalue().splitlines()[1].startswith('<testsuites name="kvaudit" tests="257" ')
