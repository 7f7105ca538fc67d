from dataclasses import replace

import pytest
from audit_runs import BuiltRun, arm_lines, full_prefill, run

from kvaudit.analysis import stats
from kvaudit.analysis.audit import Audit, analyse
from kvaudit.analysis.baseline import Change, Flips
from kvaudit.analysis.gates import GateResult, Gates, NonInferiority
from kvaudit.errors import UsageError

N = 40
WORDS = [f"w{index}" for index in range(N)]


def answers(wrong: int, first: int = 0) -> str:
    """N answers, `wrong` of them not full prefill's, from `first` on."""
    return " ".join(f"{word}x" if first <= index < first + wrong else word for index, word in enumerate(WORDS))


def policy(name: str = "p", chronological: int = 0, other: int = 0, first: int = 0, reset: int = 0) -> str:
    orders = {"chronological": answers(chronological), "reversed": answers(other, first)}
    return arm_lines(name, orders, answers(reset), answers(chronological))


def audit_run(*policies: str, **settings) -> BuiltRun:
    return run(full_prefill(answers(0)) + "\n".join(policies or (policy(),)), settings=settings or None)


def audit(now: BuiltRun, before: BuiltRun, **gates) -> Audit:
    return analyse(now, Gates(**gates), baseline=before)


def changed(audit: Audit, metric: str = "fidelity_change", **where) -> Change:
    assert audit.baseline is not None
    (found,) = [
        change
        for change in audit.baseline.changes
        if change.figure.metric == metric
        and all(getattr(change.figure, name) == value for name, value in where.items())
    ]
    return found


def gate(audit: Audit) -> GateResult:
    (result,) = audit.verdict.gates
    return result


def test_fidelity_is_paired_request_by_request():
    found = audit(audit_run(policy(other=10, first=5)), audit_run(policy(other=8)))
    change = changed(found, order="reversed", control="none")
    assert (change.before, change.now) == (0.8, 0.75)
    assert change.figure.value == pytest.approx(-0.05)
    assert change.figure.discordant == (5, 7)
    assert change.figure.p_value == pytest.approx(0.774, abs=0.001)
    assert changed(found, order="chronological", control="none").figure.value == 0
    assert changed(found, control="reset").figure.n == N


def test_answer_variation_is_paired_and_flips_are_listed_both_ways():
    found = audit(audit_run(policy(other=3, first=1)), audit_run(policy(other=2)))
    change = changed(found, "variation_change")
    assert (change.before, change.now) == (2 / N, 3 / N)
    assert change.figure.value == pytest.approx(1 / N)
    assert found.baseline is not None
    assert found.baseline.flips == (Flips("p", ("r2", "r3"), ("r0",)),)


def test_the_direction_is_from_the_baseline_to_the_run():
    assert changed(audit(audit_run(policy(other=4)), audit_run()), order="reversed").figure.value == -0.1
    assert changed(audit(audit_run(), audit_run(policy(other=4))), order="reversed").figure.value == 0.1


def test_only_requests_with_the_same_prompt_are_paired():
    """Under the same id another prompt is another request; a digest that differs makes every prompt be looked at."""
    documents = [[f"d{index}"] for index in range(N)]
    lines = full_prefill(answers(0)) + policy()
    before = run(lines, documents=documents)
    now = run(lines, documents=[["other"], *documents[1:-1], []])
    now = replace(now, manifest={**now.manifest, "trace": {"digest": "another"}})
    found = audit(now, before).baseline
    assert found is not None
    assert (found.requests, found.only_now, found.only_before) == (N - 2, 2, 2)
    assert {change.figure.n for change in found.changes} == {N - 2}


def test_prompts_without_segments_are_the_same_only_in_the_same_trace():
    assert len(audit(audit_run(), audit_run()).baseline.changes) == 4  # type: ignore[union-attr]
    other = audit_run()
    other = replace(other, manifest={**other.manifest, "trace": {"digest": "another"}})
    nameless = replace(other, manifest={**other.manifest, "trace": None})
    for now, before in ((audit_run(), other), (nameless, nameless)):
        found = audit(now, before, max_fidelity_drop=1.0)
        assert found.baseline is not None
        assert (found.baseline.requests, found.baseline.changes) == (0, ())
        assert found.verdict.outcome == "inconclusive"


def test_the_order_of_segments_is_part_of_a_prompt():
    lines = full_prefill(answers(0)) + policy()
    before = run(lines, documents=[["d1", "d2"], *([f"e{index}"] for index in range(1, N))])
    now = run(lines, documents=[["d2", "d1"], *([f"e{index}"] for index in range(1, N))])
    now = replace(now, manifest={**now.manifest, "trace": {"digest": "another"}})
    assert audit(now, before).baseline.requests == N - 1  # type: ignore[union-attr]


def test_shuffles_of_another_seed_are_other_orders():
    def seeded(seed: int) -> BuiltRun:
        built = audit_run()
        arms = tuple(replace(arm, order_seed=seed if arm.order == "reversed" else None) for arm in built.planned)
        return replace(built, planned=arms)

    found = audit(seeded(1), seeded(2)).baseline
    assert found is not None
    assert {(change.figure.order, change.figure.control) for change in found.changes} == {
        ("chronological", "none"),
        ("chronological", "reset"),
    }
    assert len(audit(seeded(1), seeded(1)).baseline.changes) == 4  # type: ignore[union-attr]


def test_a_gate_cannot_pass_on_orders_that_the_baseline_did_not_replay():
    more = arm_lines(
        "p", {"chronological": answers(0), "reversed": answers(0), "shuffle-1": answers(N - 1)}, answers(0), answers(0)
    )
    found = audit(audit_run(more), audit_run(), max_fidelity_drop=0.5, max_variation_rise=0.5)
    assert found.baseline is not None
    assert found.baseline.unpaired == (("p", "shuffle-1"),)
    assert [(result.outcome, result.why) for result in found.verdict.gates] == [("inconclusive", "orders-unpaired")] * 2
    assert audit(audit_run(), audit_run(more), max_fidelity_drop=0.5).verdict.outcome == "pass"


def test_five_orders_at_the_limit_do_not_fail_five_times_as_often():
    """Each order's own 95 % interval is beyond the limit, Bonferroni's for five is not."""
    orders = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")

    def worse(count: int) -> BuiltRun:
        by_order = dict.fromkeys(orders[1:], answers(count)) | {"chronological": answers(0)}
        return audit_run(arm_lines("p", by_order, answers(0), answers(0)))

    edge = next(count for count in range(N) if stats.paired_difference(0, count, N).high < 0)
    assert gate(audit(worse(edge), worse(0), max_fidelity_drop=0.0)).outcome == "inconclusive"
    assert gate(audit(worse(3 * edge), worse(0), max_fidelity_drop=0.0)).outcome == "fail"


def test_policies_of_one_run_alone_are_named_and_not_paired():
    found = audit(audit_run(policy("p"), policy("q")), audit_run(policy("p"), policy("r"))).baseline
    assert found is not None
    assert (found.policies_only_now, found.policies_only_before) == (("q",), ("r",))
    assert {change.figure.policy for change in found.changes} == {"p"}


def test_settings_that_changed_are_told_by_their_place_and_once():
    now = audit_run(model="m", switches={"mask": "exact", "gap": "zero"})
    now.manifest["engine"] = {"switches": {"mask": "exact"}, "torch": "2.13"}
    before = audit_run(model="m", switches={"mask": "bottom-right"})
    before.manifest["engine"] = {"switches": {"mask": "bottom-right"}, "torch": "2.12"}
    found = audit(now, before).baseline
    assert found is not None
    assert {setting.name: (setting.before, setting.now) for setting in found.settings} == {
        "settings.switches.mask": ("bottom-right", "exact"),
        "settings.switches.gap": (None, "zero"),
        "engine.torch": ("2.12", "2.13"),
    }


# Gates against the baseline: pass when the whole interval keeps the limit, fail when none of it does


@pytest.mark.parametrize(
    ("now", "limit", "outcome", "why"),
    [
        (0, 0.15, "pass", "kept"),
        (0, 0.01, "inconclusive", "no-power"),
        (20, 0.05, "fail", "broken"),
        (4, 0.05, "inconclusive", "no-power"),
    ],
)
def test_a_drop_of_fidelity_is_judged_by_the_paired_interval(now, limit, outcome, why):
    found = audit(audit_run(policy(chronological=now, other=now)), audit_run(), max_fidelity_drop=limit)
    result = gate(found)
    assert (result.gate, result.outcome, result.why) == ("max-fidelity-drop", outcome, why)
    assert result.value == -now / N
    assert found.verdict.outcome == outcome


def test_the_number_of_requests_that_would_do_is_told():
    result = gate(audit(audit_run(), audit_run(), max_fidelity_drop=0.01))
    assert result.needed is not None
    assert result.needed > N
    broken = gate(audit(audit_run(policy(chronological=4, other=4)), audit_run(), max_fidelity_drop=0.05))
    assert broken.needed is None


@pytest.mark.parametrize(
    ("now", "limit", "outcome"), [(0, 0.15, "pass"), (0, 0.01, "inconclusive"), (20, 0.05, "fail")]
)
def test_a_rise_of_answer_variation_is_judged_by_its_interval(now, limit, outcome):
    result = gate(audit(audit_run(policy(other=now)), audit_run(), max_variation_rise=limit))
    assert (result.gate, result.outcome, result.value) == ("max-variation-rise", outcome, now / N)
    assert result.bound is not None
    assert result.bound > result.value


def test_the_worst_order_counts():
    result = gate(audit(audit_run(policy(other=20)), audit_run(), max_fidelity_drop=0.05))
    assert (result.outcome, result.order) == ("fail", "reversed")


def test_a_gate_on_an_inconclusive_baseline_is_inconclusive():
    noisy = run(full_prefill(answers(0), answers(1)) + policy())
    result = gate(audit(audit_run(), noisy, max_fidelity_drop=0.5))
    assert (result.outcome, result.why) == ("inconclusive", "finding-inconclusive")


def test_a_policy_that_the_baseline_lacks_cannot_pass():
    found = audit(audit_run(policy("q")), audit_run(policy("p")), max_fidelity_drop=1.0, max_variation_rise=1.0)
    assert [(result.outcome, result.why) for result in found.verdict.gates] == [("inconclusive", "not-compared")] * 2
    assert found.verdict.outcome == "inconclusive"


def test_a_relative_limit_needs_a_baseline():
    with pytest.raises(UsageError, match="need another run"):
        analyse(audit_run(), Gates(max_fidelity_drop=0.1))


# Non-inferiority of one policy to another


def against(worse: int, better: int, margin: float, **names: str) -> GateResult:
    built = audit_run(policy("a", chronological=worse, other=worse), policy("b", chronological=better, other=better))
    pair = NonInferiority(names.get("policy", "a"), names.get("than", "b"), margin)
    return gate(analyse(built, Gates(non_inferior=(pair,))))


@pytest.mark.parametrize(
    ("worse", "better", "margin", "outcome"),
    [(0, 0, 0.15, "pass"), (0, 0, 0.01, "inconclusive"), (20, 0, 0.05, "fail"), (4, 0, 0.05, "inconclusive")],
)
def test_a_policy_is_held_against_another(worse, better, margin, outcome):
    result = against(worse, better, margin)
    assert (result.gate, result.outcome, result.than) == ("non-inferior", outcome, "b")
    assert result.value == (better - worse) / N


def test_no_difference_found_is_not_non_inferiority():
    """The p-value of 4 against 0 is above 0.05, and the margin is still not kept."""
    result = against(4, 0, 0.05)
    assert (result.outcome, result.why) == ("inconclusive", "no-power")


def test_the_order_in_which_the_policies_ran_does_not_matter():
    forward, backward = against(20, 0, 0.05), against(0, 20, 0.05, policy="b", than="a")
    assert (forward.outcome, forward.value) == (backward.outcome, backward.value)
    assert forward.bound == pytest.approx(backward.bound)


def test_a_better_policy_is_non_inferior():
    assert against(0, 20, 0.0).outcome == "pass"


@pytest.mark.parametrize("pair", [("a", "nobody"), ("nobody", "a")])
def test_an_unknown_policy_is_refused(pair):
    with pytest.raises(UsageError, match="nobody"):
        analyse(audit_run(policy("a")), Gates(non_inferior=(NonInferiority(*pair, 0.1),)))


def test_a_policy_is_not_held_against_itself():
    with pytest.raises(UsageError, match="itself"):
        Gates(non_inferior=(NonInferiority("a", "a", 0.1),))


@pytest.mark.parametrize("margin", [-0.1, 2.0, float("nan")])
def test_a_margin_is_a_share(margin):
    with pytest.raises(UsageError, match="share"):
        Gates(non_inferior=(NonInferiority("a", "b", margin),))


def test_the_policy_that_another_is_held_against_must_be_conclusive_too():
    noisy = arm_lines("b", {"chronological": answers(0), "reversed": answers(0)}, answers(0), answers(1))
    built = audit_run(policy("a"), noisy)
    result = gate(analyse(built, Gates(non_inferior=(NonInferiority("a", "b", 0.5),), policies=None)))
    assert (result.outcome, result.why) == ("inconclusive", "finding-inconclusive")


@pytest.mark.parametrize("worse", [1, 2, 5])
def test_a_bootstrap_narrower_than_the_paired_interval_is_not_trusted(worse):
    result = against(worse, 0, 0.05)
    careful = stats.paired_difference(0, worse, N)
    assert careful is not None
    assert careful.low is not None
    assert result.bound is not None
    assert result.bound <= careful.low


def test_figures_are_plain_numbers():
    """What a report writes as JSON, it must get as Python's own numbers."""
    found = audit(audit_run(policy(other=3, first=1, chronological=1)), audit_run(policy(other=2)))
    assert found.baseline is not None
    for figure in (*found.figures, *(change.figure for change in found.baseline.changes)):
        for number in (figure.value, figure.low, figure.high, figure.n, figure.p_value, figure.p_adjusted):
            assert type(number) in (float, int, type(None)), figure
