"""The audit against the truth: faults that are planted in an engine, and the verdict that each must get."""

from dataclasses import dataclass, field

import pytest
from fakes import rolling_trace, run_scripted, scripted_settings

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.gates import Gates
from kvaudit.engines.scripted import FAULTS
from kvaudit.errors import EngineError
from kvaudit.store import open_run

GATES = Gates(max_variation=0.15)
REQUESTS = 80
"""In blocks of 3, as many as windows overlap, these are 26: without any variation the upper bound is 13.2 %."""
TIGHT = 150_000
"""Bytes: less than the chunks of one window, so that chunks are evicted and written again."""


@dataclass(frozen=True)
class Case:
    fault: str
    outcome: str
    seen: str
    reasons: frozenset[str] = frozenset()
    settings: dict = field(default_factory=dict)
    prelude: bool = False

    def __str__(self):
        return "-".join([self.fault, *map(str, self.settings.values()), *(["prelude"] if self.prelude else [])])


def passes(fault, **fields):
    return Case(fault, "pass", "none-seen", **fields)


def fails(fault, **fields):
    return Case(fault, "fail", "history-sensitive", **fields)


def inconclusive(fault, *reasons, **fields):
    return Case(fault, "inconclusive", "inconclusive", frozenset(reasons), **fields)


MATRIX = [
    passes("none"),
    passes("none", prelude=True),
    passes("none", settings={"capacity": TIGHT}),
    passes("none", settings={"figures": "none"}),
    passes("eviction"),
    fails("previous-request"),
    fails("previous-request", prelude=True),
    fails("earlier-requests"),
    fails("position"),
    fails("eviction", settings={"capacity": TIGHT}),
    inconclusive("stale-cache", "cache-not-empty", "repeat-differs"),
    inconclusive("stale-cache", "cache-not-empty", prelude=True),
    inconclusive("hidden-stale-cache", "cache-not-empty", "repeat-differs"),
    inconclusive("hidden-stale-cache", "cache-not-empty", prelude=True),
    inconclusive("random", "noise-floor", "repeat-differs"),
    inconclusive("random-reuse", "repeat-differs"),
    inconclusive("rounding", "within-rounding"),
    inconclusive("rounding", "within-rounding", prelude=True),
    inconclusive("no-reuse", "nothing-reused"),
]


def audited(path, case, requests=REQUESTS, policies=("token-topk",), gates=GATES):
    trace = rolling_trace(requests, window=3, prelude=case.prelude)
    run = run_scripted(path, trace, scripted_settings(case.fault, **case.settings), policies=policies)
    return analyse(run, gates, run.provenance)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_the_verdict_is_right_for_every_fault(tmp_path, case):
    audit = audited(tmp_path / "run", case)
    (finding,) = audit.findings
    assert audit.verdict.outcome == case.outcome
    assert finding.seen == case.seen
    assert {reason.code for reason in finding.reasons} >= case.reasons
    assert bool(finding.reasons) == (case.outcome == "inconclusive")
    assert finding.own_losses == 0 or case.outcome == "inconclusive"


def test_the_matrix_holds_every_fault_that_can_be_planted():
    assert {case.fault for case in MATRIX} == set(FAULTS) - {"crash"}


def test_a_fault_under_one_policy_is_that_policys_alone(tmp_path):
    case = fails("position", settings={"only-policy": "token-topk"})
    audit = audited(tmp_path / "run", case, policies=("token-topk", "none"))
    assert {finding.policy: finding.seen for finding in audit.findings} == {
        "token-topk": "history-sensitive",
        "none": "none-seen",
    }
    assert audit.verdict.outcome == "fail"
    spared = analyse(open_run(tmp_path / "run"), Gates(max_variation=0.15, policies=("none",)))
    assert spared.verdict.outcome == "pass"


def test_an_audit_whose_engine_crashed_is_inconclusive(tmp_path):
    trace = rolling_trace(REQUESTS, window=3)
    settings = scripted_settings("crash", at="r70")
    with pytest.raises(EngineError):
        run_scripted(tmp_path / "run", trace, settings, policies=("none",))
    run = open_run(tmp_path / "run")
    audit = analyse(run, GATES, run.provenance)
    assert audit.verdict.outcome == "inconclusive"
    assert "arms-unfinished" in {reason.code for reason in audit.findings[0].reasons}


def test_few_requests_are_no_ground_for_a_pass(tmp_path):
    audit = audited(tmp_path / "run", passes("none"), requests=10)
    assert (audit.findings[0].seen, audit.verdict.outcome) == ("none-seen", "inconclusive")
    assert audit.verdict.gates[0].why == "no-power"


@pytest.mark.parametrize(
    ("case", "outcome", "code"),
    [
        (passes("none"), "no gates", 0),
        (fails("position"), "no gates", 0),
        (inconclusive("no-reuse"), "inconclusive", 4),
    ],
    ids=str,
)
def test_without_gates_only_the_finding_counts(tmp_path, case, outcome, code):
    verdict = audited(tmp_path / "run", case, requests=20, gates=Gates()).verdict
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
