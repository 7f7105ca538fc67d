"""How often a whole audit is wrong: 2,000 audits of policies that have no history, and coverage of the intervals.

Every policy of an audit has the same true fidelity in every order; its errors are its own. Half of the audits have near
ties: a few requests that a run answers by the toss of a coin, as many as make a finding most often wrong. A rate that
must not be exceeded is tested by its count, against the one-sided 99.9 % bound of the binomial distribution.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from audit_runs import BuiltRun, PlannedArm, arm
from scipy.stats import binom

from kvaudit.analysis import stats
from kvaudit.analysis.audit import analyse
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.gates import GateResult, Gates, NonInferiority
from kvaudit.analysis.stats import Estimate
from kvaudit.schema import TABLES

pytestmark = pytest.mark.slow

AUDITS = 2_000
REQUESTS = 60
POLICIES = ("p", "q", "r")
ORDERS = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")
ARMS = (
    arm("full-prefill"),
    arm("full-prefill", control="repeat"),
    *(
        planned
        for policy in POLICIES
        for planned in (
            *(arm(policy, order) for order in ORDERS),
            arm(policy, control="reset"),
            arm(policy, control="repeat"),
        )
    ),
)
FIDELITY = 0.9
TIES = 5
"""With three or fewer the chance of a lucky repeat is never below 5 %; with more than five the repeat is lucky less
often: five make 2.4 % of findings wrong, the most of any number."""
FAMILIES = ("fidelity_difference", "cochran_policies", "order_difference", "cochran_orders", "history_loss")
GATES = Gates(
    min_fidelity=FIDELITY,
    non_inferior=(NonInferiority("p", "q", 0.0), NonInferiority("r", "q", 0.0)),
)
"""Every true value is exactly at its limit."""


def at_most(count: int, among: int, rate: float) -> bool:
    return count <= binom.ppf(0.999, among, rate)


def history_free(generator: np.random.Generator, ties: int) -> BuiltRun:
    """An audit in which a policy's answer is right or wrong whatever was served before, but for `ties` requests."""
    right = np.arange(REQUESTS)
    answers = {policy: np.where(generator.random(REQUESTS) < FIDELITY, right, right + REQUESTS) for policy in POLICIES}
    tied = {policy: generator.permutation(REQUESTS)[:ties] for policy in POLICIES}
    rows = []
    for planned in ARMS:
        answer = answers.get(planned.policy, right).copy()
        if planned.policy in POLICIES:
            answer[tied[planned.policy]] += 2 * REQUESTS * generator.integers(0, 2, ties)
        rows.append(answer)
    return tables(np.array(rows))


def tables(answers: np.ndarray, window: int = 0, planned_arms: Sequence[PlannedArm] = ARMS) -> BuiltRun:
    """A run with these answers [arms, requests], as Arrow columns; request i holds the documents from i on."""
    arms, requests = answers.shape
    size = answers.size
    position = np.tile(np.arange(requests), arms)
    planned = [planned_arms[index] for index in np.repeat(np.arange(arms), requests)]
    is_policy = np.array([one.policy != "full-prefill" for one in planned])
    resets = np.array([one.control == "reset" for one in planned])
    fresh = (position == 0) | resets
    reused = np.where(is_policy & ((position > 0) | resets), 60, 0)  # under reset, of a prelude
    columns = {
        "arm_id": [one.arm_id for one in planned],
        "engine": ["simulated"] * size,
        "policy": [one.policy for one in planned],
        "order": [one.order for one in planned],
        "control": [one.control for one in planned],
        "position": position,
        "request_id": np.char.add("r", position.astype(str)),
        "prompt_tokens": np.full(size, 100),
        "answer_text": np.char.add("a", answers.ravel().astype(str)),
        "first_reused_tokens": np.where(fresh, 0, reused),
        "reused_tokens": reused,
        "cache_entries_before": np.where(fresh, 0, 5),
    }
    schema = TABLES["observations"]
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(size, f.type) for f in schema]
    return BuiltRun(
        tuple(planned_arms),
        {"observations": pa.Table.from_arrays(arrays, schema=schema), "requests": requests_table(requests, window)},
        {"schema_version": 1, "settings": {"seed": 0}},
    )


@cache
def requests_table(requests: int, window: int) -> pa.Table:
    def segment(document: int) -> dict[str, object]:
        return {"kind": "document", "content_id": f"d{document}", "start": 0, "end": 1}

    rows = [
        {
            "request_id": f"r{index}",
            "ordinal": index,
            "prompt_tokens": 100,
            "segments": [segment(document) for document in range(index, index + window)],
        }
        for index in range(requests)
    ]
    return pa.Table.from_pylist(rows, TABLES["requests"])


@dataclass(frozen=True)
class Outcome:
    """What counts of an audit; `alarms` are the families with any adjusted p-value below 0.05."""

    findings: tuple[Finding, ...]
    alarms: frozenset[str]
    gates: tuple[GateResult, ...]


def outcome(built: BuiltRun, gates: Gates = GATES) -> Outcome:
    audit = analyse(built, gates)
    alarms = {figure.metric for figure in audit.figures if figure.p_adjusted is not None and figure.p_adjusted < 0.05}
    return Outcome(audit.findings, frozenset(alarms), audit.verdict.gates)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Half without and half with ties. No finding, p-value or gate here depends on the number of resamples."""
    generator = np.random.default_rng(20_000)
    outcome(history_free(np.random.default_rng(0), TIES))
    gc.collect()
    gc.freeze()  # statsmodels collects garbage in every adjustment, over all that is loaded by now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "RESAMPLES", 100)
        found = {
            name: [outcome(history_free(generator, ties)) for _ in range(AUDITS // 2)]
            for name, ties in (("steady", 0), ("tied", TIES))
        }
    gc.unfreeze()
    return found


def test_no_audit_without_noise_finds_history(outcomes):
    assert {finding.seen for audit in outcomes["steady"] for finding in audit.findings} == {"none-seen"}


def test_noise_passes_for_history_at_most_as_often_as_stated(outcomes):
    findings = [finding for audit in outcomes["tied"] for finding in audit.findings]
    wrong = [finding for finding in findings if finding.seen == "history-sensitive" and finding.noise_excluded]
    assert at_most(len(wrong), len(findings), 0.05)
    assert len(wrong) > 0.01 * len(findings)


@pytest.mark.parametrize("noise", ["steady", "tied"])
def test_a_family_of_tests_raises_a_false_alarm_at_most_as_often_as_stated(outcomes, noise):
    alarms = Counter(family for audit in outcomes[noise] for family in audit.alarms)
    assert set(alarms) <= set(FAMILIES)
    assert all(at_most(alarms[family], len(outcomes[noise]), 0.05) for family in FAMILIES)


@pytest.mark.parametrize("noise", ["steady", "tied"])
def test_a_gate_at_its_limit_passes_at_most_as_often_as_stated(outcomes, noise):
    results = [result for audit in outcomes[noise] for result in audit.gates]
    judged = Counter(result.gate for result in results)
    passed = Counter(result.gate for result in results if result.outcome == "pass")
    assert set(judged) == {"min-fidelity", "non-inferior"}
    assert all(at_most(passed[gate], judged[gate], 0.025) for gate in judged)


SERVER_ARMS = (
    *ARMS[:2],
    *(arm("as-served", order) for order in ORDERS),
    arm("as-served", control="reset"),
    *(arm("as-served", order, "repeat") for order in ORDERS),
)


def served(disturbed: np.ndarray) -> Finding:
    """The finding of a server without history of which some answers, bool [arms, requests], are others."""
    answers = np.where(disturbed, np.arange(disturbed.size).reshape(disturbed.shape), -1)
    return outcome(tables(answers, planned_arms=SERVER_ARMS), Gates()).findings[0]


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_a_server_that_is_merely_noisy_is_called_sensitive_at_most_as_often_as_stated(noise, monkeypatch):
    monkeypatch.setattr(stats, "RESAMPLES", 100)
    generator = np.random.default_rng(6)
    seen = Counter(served(generator.random((len(SERVER_ARMS), 16)) < noise).seen for _ in range(200))
    assert at_most(seen["history-sensitive"], 200, 0.05)
    assert noise > 0.002 or seen["none-seen"] > 50


@pytest.mark.parametrize("orders", [2, 3, 5])
def test_a_server_that_each_start_may_change_is_called_sensitive_at_most_as_often_as_stated(orders, monkeypatch):
    """Of two kernels that differ on half of the requests every start takes one by chance."""
    monkeypatch.setattr(stats, "RESAMPLES", 100)
    generator, odd = np.random.default_rng(8), np.arange(16) % 2 == 0
    arms = [one for one in SERVER_ARMS if one.order in ORDERS[:orders]]
    seen = Counter()
    for _ in range(200):
        answers = np.where(odd & (generator.random((len(arms), 1)) < 0.5), -2, -1)
        built = replace(tables(answers, planned_arms=arms), manifest=RESTARTED)
        seen[outcome(built, Gates()).findings[0].seen] += 1
    assert at_most(seen["history-sensitive"], 200, 0.05)


RESTARTED = {"schema_version": 1, "settings": {"seed": 0}, "engine": {"restarted": True}}


def test_a_server_that_is_disturbed_for_as_long_as_some_arms_last_is_not_called_sensitive(monkeypatch):
    """As long as all arms between an order and its repeat, and in the middle of arms too."""
    monkeypatch.setattr(stats, "RESAMPLES", 100)
    generator, requests = np.random.default_rng(7), 16
    flips = generator.random((len(SERVER_ARMS), requests)) < 0.5
    for begin in range(0, flips.size, requests // 2):
        for arms in (1, 2, len(ORDERS)):
            inside = np.zeros(flips.size, bool)
            inside[begin : begin + arms * requests] = True
            assert served(flips & inside.reshape(flips.shape)).seen != "history-sensitive"


WINDOW, SPOILT = 5, 0.03


def test_audits_of_overlapping_windows_keep_every_level(monkeypatch):
    """Answers are wrong while a spoilt document is in the window, a policy's own: neighbours are wrong together."""
    monkeypatch.setattr(stats, "RESAMPLES", 100)
    generator, true_fidelity = np.random.default_rng(5), (1 - SPOILT) ** WINDOW
    gates = Gates(min_fidelity=true_fidelity, non_inferior=GATES.non_inferior)
    right = np.arange(REQUESTS)
    found = []
    for _ in range(500):
        answers = {policy: windows(generator, REQUESTS, WINDOW, SPOILT, runs=1)[0] for policy in POLICIES}
        rows = [np.where(answers.get(planned.policy, True), right, right + REQUESTS) for planned in ARMS]
        found.append(outcome(tables(np.array(rows), WINDOW), gates))
    assert {finding.overlap for audit in found for finding in audit.findings} == {WINDOW}
    alarms = Counter(family for audit in found for family in audit.alarms)
    assert all(at_most(alarms[family], len(found), 0.05) for family in FAMILIES)
    results = [result for audit in found for result in audit.gates]
    passed, judged = (
        Counter(r.gate for r in results if r.outcome in kept) for kept in ({"pass"}, {"pass", "inconclusive", "fail"})
    )
    assert all(at_most(passed[gate], judged[gate], 0.025) for gate in judged)
    failed = Counter(result.gate for result in results if result.outcome == "fail")
    assert at_most(failed["non-inferior"], judged["non-inferior"], 0.025)


@pytest.fixture
def fewer_resamples(monkeypatch):
    """A fifth of them moves a bound by less than a tenth of the interval's width, to either side alike."""
    monkeypatch.setattr(stats, "RESAMPLES", 1_000)


def missed(estimates: Sequence[Estimate | None], truth: float) -> tuple[float, float]:
    """How often the truth is below and above the interval."""
    found = [estimate for estimate in estimates if estimate is not None]
    below = np.mean([truth < estimate.low - 1e-12 for estimate in found])
    above = np.mean([truth > estimate.high + 1e-12 for estimate in found])
    return float(below), float(above)


@pytest.mark.parametrize("n", [16, 60, 500])
def test_wilson_covers(n):
    """95 % on average; at one share, as every interval of counts, now more and now less (Brown, Cai, DasGupta 2001)."""
    bounds = [(estimate.low, estimate.high) for estimate in (stats.wilson(right, n) for right in range(n + 1))]
    low, high = np.array(bounds).T
    shares = np.linspace(0.5, 0.98, 97)
    covered = [binom.pmf(np.arange(n + 1), n, p)[(low <= p) & (p <= high)].sum() for p in shares]
    assert np.mean(covered) >= 0.949
    assert min(covered) >= 0.90


def windows(generator: np.random.Generator, n: int, width: int, spoilt: float, runs: int = 2_000) -> np.ndarray:
    """Answers [runs, n] over a rolling window of documents: wrong while a spoilt document is in it."""
    documents = generator.random((runs, n + width - 1)) < spoilt
    return ~np.lib.stride_tricks.sliding_window_view(documents, width, axis=1).any(axis=2)


OVERLAPS = [(16, 5), (60, 5), (60, 8), (200, 8)]


@pytest.mark.parametrize(("n", "width"), OVERLAPS)
def test_wilson_in_blocks_covers_where_answers_hang_on_shared_documents(n, width):
    """Its lower bound, which gates stand on, and both together; counting every request, a third of them miss."""
    right = windows(np.random.default_rng(1), n, width, 0.03).sum(axis=1)
    truth, block = 0.97**width, stats.block_length(width, n)
    below, above = missed([stats.wilson(int(count), n, block) for count in right], truth)
    assert at_most(round(2_000 * below), 2_000, 0.025)
    assert at_most(round(2_000 * (below + above)), 2_000, 0.05)
    assert sum(missed([stats.wilson(int(count), n) for count in right], truth)) > 0.25


@pytest.mark.parametrize(("n", "width"), OVERLAPS)
def test_tests_keep_their_level_where_answers_hang_on_shared_documents(n, width):
    """Three conditions that are equally good: McNemar of two of them, Cochran's Q of all."""
    generator = np.random.default_rng(2)
    runs = np.array([windows(generator, n, width, 0.05) for _ in range(3)]).transpose(1, 2, 0)
    block = stats.block_length(width, n)
    only = [((one[:, 0] & ~one[:, 1]).sum(), (one[:, 1] & ~one[:, 0]).sum()) for one in runs]
    counted = stats.independent(n, block) / n
    mcnemar = [stats.mcnemar_p(int(first), int(second), counted) for first, second in only]
    cochran = [result[1] for one in runs if (result := stats.cochran(one, block)) is not None]
    assert at_most(sum(p < 0.05 for p in mcnemar), len(runs), 0.05)
    assert at_most(sum(p < 0.05 for p in cochran), len(runs), 0.05)
    assert np.mean([stats.mcnemar_p(int(first), int(second)) < 0.05 for first, second in only]) > 0.1


def variations(generator: np.random.Generator, n: int, affected: float, runs: int = 1_000) -> np.ndarray:
    """Answer variation [runs, n] of independent requests of which a share changes with one or two of five orders."""
    return (generator.random((runs, n)) < affected) * generator.choice([0.4, 0.6], (runs, n))


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("affected", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("n", [16, 60, 200])
def test_the_interval_of_answer_variation_covers(n, affected):
    """95 % at every size where requests are independent, and 97.5 % below the upper bound, which gates stand on."""
    estimates = stats.mean_intervals(variations(np.random.default_rng(3), n, affected), 1, (0.0, 1.0), seed=0)
    below, above = missed(estimates, affected * 0.5)
    assert at_most(round(1_000 * (below + above)), 1_000, 0.05)
    assert at_most(round(1_000 * above), 1_000, 0.025)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("n", [16, 60, 200])
def test_the_interval_of_a_difference_covers(n):
    """97.5 % on either side, which gates stand on. The bootstrap alone would cover 88 % at 16 requests."""
    generator = np.random.default_rng(4)
    difference = (generator.random((1_000, n)) < 0.02) * 1.0 - (generator.random((1_000, n)) < 0.1)
    below, above = missed(stats.mean_intervals(difference, 1, (-1.0, 1.0), seed=0), -0.08)
    assert at_most(round(1_000 * below), 1_000, 0.025)
    assert at_most(round(1_000 * above), 1_000, 0.025)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(("n", "width"), OVERLAPS)
def test_intervals_over_blocks_cover_where_answers_hang_on_shared_documents(n, width):
    """Answer variation and a difference of two conditions; without blocks a third of the intervals would miss."""
    generator, block = np.random.default_rng(3), stats.block_length(width, n)
    values = ~windows(generator, n, width, 0.06, runs=1_000) * 0.5
    truth = 0.5 * (1 - 0.94**width)
    below, above = missed(stats.mean_intervals(values, block, (0.0, 1.0), seed=0), truth)
    assert at_most(round(1_000 * above), 1_000, 0.025)
    assert at_most(round(1_000 * (below + above)), 1_000, 0.05)
    first, second = windows(generator, n, width, 0.03, 1_000), windows(generator, n, width, 0.06, 1_000)
    difference = first.astype(np.float64) - second
    below, above = missed(stats.mean_intervals(difference, block, (-1.0, 1.0), seed=0), 0.97**width - 0.94**width)
    assert at_most(round(1_000 * below), 1_000, 0.025)
    assert at_most(round(1_000 * above), 1_000, 0.025)
    if n >= 60:
        assert sum(missed(stats.mean_intervals(values, 1, (0.0, 1.0), seed=0), truth)) > 0.2
