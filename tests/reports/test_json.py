import json

import pytest
from audit_runs import arm_lines, clean, full_prefill, run
from report_audits import audited, rendered, rich_run

from kvaudit.reports.json import LONGEST_TEXT, render


def data(built, **gates):
    return json.loads(rendered(render, audited(built, **gates)))


def test_keys_are_stable():
    found = data(rich_run(), min_fidelity=0.5)
    assert list(found) == [
        "report_version",
        "schema_version",
        "kvaudit_version",
        "verdict",
        "findings",
        "trace",
        "engine",
        "settings",
        "libraries",
        "requests",
        "arms",
        "figures",
        "examples",
        "gates_from",
        "baseline",
    ]
    assert set(found["verdict"]) == {"outcome", "exit_code", "gates"}
    assert {
        "gate",
        "policy",
        "limit",
        "outcome",
        "why",
        "value",
        "bound",
        "order",
        "n",
        "needed",
        "overlap",
        "than",
        "sentence",
    } == set(found["verdict"]["gates"][0])
    assert {"policy", "seen", "reasons", "flipped", "smallest_visible", "sentence", "details"} <= set(
        found["findings"][0]
    )
    shape = "metric policy order control value low high n test p_test family p_value p_adjusted discordant"
    assert set(found["figures"][0]) == set(shape.split())


def test_the_data_are_the_audit_s():
    audit = audited(rich_run())
    found = data(rich_run())
    assert found["verdict"]["outcome"] == audit.verdict.outcome
    assert [figure["value"] for figure in found["figures"]] == [figure.value for figure in audit.figures]
    assert found["requests"] == 16
    assert found["trace"]["source"] == "trace.jsonl"
    assert found["examples"][0]["origins"][0]["writer"] == audit.examples[0].origins[0].writer


def test_reasons_are_codes_with_sentences():
    found = data(run(clean("p").replace("p chronological repeat : a b c d", "p chronological repeat : a b c x")))
    (reason,) = found["findings"][0]["reasons"]
    assert (reason["code"], reason["count"], reason["total"]) == ("repeat-differs", 1, 4)
    assert reason["sentence"] == "The repeat control answered 1 of 4 requests differently; the limit is 0.0 %."


@pytest.mark.parametrize("built", [run(full_prefill("a b")), run(clean("p", "! !")), rich_run()])
def test_what_is_undefined_is_null(built):
    text = rendered(render, audited(built))
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_answers_come_as_they_are_and_cut_when_huge():
    built = run(
        full_prefill("t b c") + arm_lines("p", {"chronological": "t b c", "reversed": "u e _"}, "t b c", "t b c"),
        texts={"t": "a" * 1_000_000, "u": "b" * 1_000_000, "e": "\x1b\u2028\u202e"},
    )
    found = {example["request_id"]: example for example in data(built)["examples"]}
    assert found["r0"]["reference"] == {"text": "a" * LONGEST_TEXT, "characters": 1_000_000}
    assert found["r1"]["answers"][0]["text"] == "\x1b\u2028\u202e"
    assert found["r2"]["answers"][0]["text"] == ""
