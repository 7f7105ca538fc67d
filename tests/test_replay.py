import weakref
from dataclasses import replace

import pytest
from fakes import rolling_trace, run_scripted, scripted_settings

from kvaudit.engines import Capabilities
from kvaudit.engines.scripted import open_engine
from kvaudit.errors import EngineError, PolicyError, RunError, UsageError
from kvaudit.policies.bounds import RecomputeAll
from kvaudit.policies.controls import TokenRuns
from kvaudit.policies.rounding import watched
from kvaudit.records import CacheState, Reference
from kvaudit.replay import Silent
from kvaudit.store import open_run

TRACE = rolling_trace(4, window=3)
WITH_PRELUDE = rolling_trace(4, window=3, prelude=True)


class Watched:
    """The scripted engine, with every call written down; `change` may alter what it says."""

    def __init__(self, settings, log, change=None):
        self._engine, self._log, self._change = open_engine(settings), log, change
        log.append("open")

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def reset(self):
        self._log.append("reset")
        return self._engine.reset()

    def close(self):
        self._log.append("close")
        self._engine.close()

    def serve(self, request_id, part, prompt, sampling, policy, reference=None):
        name = None if policy is None else policy.name
        self._log.append((request_id, part, name, reference is not None))
        served = self._engine.serve(request_id, part, prompt, sampling, policy, reference)
        return self._change(served) if self._change else served


def replayed(path, trace=TRACE, *, change=None, **options):
    log = []
    run = run_scripted(
        path, trace, policies=("none",), orders=2, open_engine=lambda s: Watched(s, log, change), **options
    )
    return run, log


def observations(run, arm=None):
    return [row for row in run.table("observations").to_pylist() if arm in (None, row["arm_id"])]


def calls(policy, ordinals, *, reference=True, reset_each=False, prelude=False):
    """The calls of one arm over requests r0, r1, ..., of which all but r0 have a prelude if any has."""
    made = []
    for ordinal in ordinals:
        made += ["reset"] if reset_each or not made else []
        made += [(f"r{ordinal}", "prelude", policy, False)] if prelude and ordinal else []
        made += [(f"r{ordinal}", "request", policy, reference)]
    return made


@pytest.mark.parametrize("prelude", [False, True])
def test_arms_are_served_in_order_each_from_a_reset(tmp_path, prelude):
    """The second full prefill gets a fresh engine; full prefill, which keeps no cache, needs no prelude."""
    _, log = replayed(tmp_path / "run", WITH_PRELUDE if prelude else TRACE)
    forward, backward = range(4), range(3, -1, -1)
    assert log == [
        "open",
        *calls(None, forward, reference=False),
        "close",
        "open",
        *calls(None, forward),
        *calls("none", forward, prelude=prelude),
        *calls("none", backward, prelude=prelude),
        *calls("none", forward, prelude=prelude, reset_each=True),
        *calls("none", forward, prelude=prelude),
        "close",
    ]


def test_what_a_prelude_reused_and_what_was_in_the_cache_is_recorded(tmp_path):
    run, _ = replayed(tmp_path / "run", WITH_PRELUDE)
    columns = ("request_id", "prelude_reused_tokens", "first_reused_tokens", "cache_entries_before")
    shown = {
        arm: [tuple(row[name] for name in columns) for row in observations(run, arm)]
        for arm in ("none.chronological", "none.chronological.reset", "full-prefill.chronological")
    }
    first, second, *_ = shown["none.chronological"]
    assert first == ("r0", None, 0, 0)
    assert second[1] == second[2] > 0
    assert second[3] is None
    assert shown["none.chronological.reset"][1:] == [(f"r{i}", 0, 0, 0) for i in (1, 2, 3)]
    assert shown["full-prefill.chronological"][1] == ("r1", None, 0, None)


def test_positions_follow_the_order(tmp_path):
    run, _ = replayed(tmp_path / "run")
    shown = [(row["position"], row["request_id"]) for row in observations(run, "none.reversed")]
    assert shown == [(0, "r3"), (1, "r2"), (2, "r1"), (3, "r0")]


def test_first_difference_is_held_against_full_prefill(tmp_path):
    run, _ = replayed(tmp_path / "run", settings=scripted_settings("position"))
    answers = {row["request_id"]: row["answer_ids"] for row in observations(run, "full-prefill.chronological")}
    for row in observations(run, "none.chronological"):
        pairs = zip(row["answer_ids"], answers[row["request_id"]], strict=True)
        expected = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
        assert row["first_difference"] == expected
        assert (expected is None) == (row["position"] == 0)
    reference = observations(run, "full-prefill.chronological")
    assert {row["first_difference"] for row in reference} == {None}


def test_references_are_read_back_from_disk_as_the_engine_gave_them(tmp_path):
    given, taken = {}, {}

    class Listening(Watched):
        def serve(self, request_id, part, prompt, sampling, policy, reference=None):
            served = super().serve(request_id, part, prompt, sampling, policy, reference)
            if served.reference:
                given[request_id] = served.reference
            taken[request_id] = reference
            return served

    run_scripted(tmp_path / "run", TRACE, open_engine=lambda s: Listening(s, []))
    for request_id, reference in taken.items():
        assert reference.generated_ids == given[request_id].generated_ids
        assert [tuple(ids) for ids in reference.top_ids] == given[request_id].top_ids
        for row, expected in zip(reference.top_logprobs, given[request_id].top_logprobs, strict=True):
            assert row == pytest.approx(expected)


def test_an_engine_without_log_probabilities_still_gives_references(tmp_path):
    run = run_scripted(tmp_path / "run", TRACE, scripted_settings(figures="none"))
    rows = run.table("references").to_pylist()
    answers = {row["request_id"]: row["answer_ids"] for row in observations(run, "full-prefill.chronological")}
    assert [(row["generated_ids"], row["top_ids"]) for row in rows] == [(answers[f"r{i}"], []) for i in range(4)]
    assert {row["kl"] for row in observations(run)} == {None}
    assert {row["ttft_ms"] for row in observations(run)} == {None}
    assert {row["cache_entries_before"] for row in observations(run)} == {None}


def test_a_stop_token_is_in_the_reference_and_not_in_the_answer(tmp_path):
    def with_end_token(served):
        return served if served.reference is None else replace(served, reference=Reference((*served.answer_ids, 2)))

    run, _ = replayed(tmp_path / "run", change=with_end_token)
    assert run.table("references").to_pylist()[0]["generated_ids"][-1] == 2
    assert {row["first_difference"] for row in observations(run)} == {None}


def test_progress_is_told_every_arm_and_serve(tmp_path):
    told = []

    class Telling:
        def begin(self, total, done):
            told.append((total, done))

        def arm(self, arm_id, number, arms):
            told.append((arm_id, number, arms))

        def served(self):
            told.append("served")

    replayed(tmp_path / "run", progress=Telling())
    assert told[0] == (6 * 4, 0)
    assert told.count("served") == 6 * 4
    assert [event for event in told if len(event) == 3][4] == ("none.chronological.reset", 5, 6)


def failing(tmp_path, error, at=14):
    """A replay whose engine fails at some serve."""
    count = 0

    def fail(served):
        nonlocal count
        count += 1
        if count == at:
            raise error
        return served

    replayed(tmp_path / "run", change=fail)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("CUDA\nout of memory"), EngineError, "ValueError: CUDA\nout of memory"),
        (KeyError(), EngineError, "KeyError"),
        (MemoryError("no more"), EngineError, "MemoryError: no more"),
        (EngineError("logits are not finite", "take float32"), EngineError, "logits are not finite"),
        (UsageError("no such mask"), EngineError, "no such mask"),
        (PolicyError("policy 'none' returned 3 positions"), PolicyError, "policy 'none' returned 3 positions"),
    ],
)
def test_a_failure_names_arm_and_request_and_keeps_finished_arms(tmp_path, error, kind, message):
    with pytest.raises(kind) as caught:
        failing(tmp_path, error)
    assert type(caught.value) is kind
    assert caught.value.message == f"arm none.reversed, request 'r2': {message}"
    assert caught.value.exit_code == 3
    assert sum(arm.finished for arm in open_run(tmp_path / "run").arms()) == 3


def test_a_hint_of_the_engines_stays(tmp_path):
    with pytest.raises(EngineError) as caught:
        failing(tmp_path, EngineError("logits are not finite", "take float32"))
    assert caught.value.hint == "take float32"


def test_a_policy_that_breaks_its_contract_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(RecomputeAll, "select", lambda self, context: context.positions[1:])
    with pytest.raises(PolicyError, match=r"arm all.chronological, request 'r1': policy 'all' returned \d+ positions"):
        run_scripted(tmp_path / "run", TRACE, policies=("all",))


@pytest.mark.parametrize("k", [-1, 2.5, None])
def test_a_policy_with_a_broken_budget_is_named(tmp_path, monkeypatch, k):
    monkeypatch.setattr(RecomputeAll, "budget", lambda self, request: k)
    with pytest.raises(PolicyError, match=rf"arm all.chronological, request 'r0': policy 'all' returned budget {k}"):
        run_scripted(tmp_path / "run", TRACE, policies=("all",))


def test_a_policy_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    def broken(self):
        raise ValueError("no table of weights")

    monkeypatch.setattr(RecomputeAll, "__init__", broken)
    with pytest.raises(UsageError, match=r"policy 'all' cannot be made: ValueError: no table of weights"):
        run_scripted(tmp_path / "run", TRACE, policies=("all",))
    assert not (tmp_path / "run").exists()


def test_a_policy_that_cannot_be_made_for_a_later_arm_is_named_and_finished_arms_stay(tmp_path, monkeypatch):
    def broken(self):
        raise ValueError("no table of weights")

    class Breaking(Silent):
        def arm(self, arm_id, number, arms):
            if arm_id == "all.reversed":
                monkeypatch.setattr(RecomputeAll, "__init__", broken)

    with pytest.raises(PolicyError, match=r"policy 'all' cannot be made: ValueError: no table of weights"):
        run_scripted(tmp_path / "run", TRACE, policies=("all",), progress=Breaking())
    assert sum(arm.finished for arm in open_run(tmp_path / "run").arms()) == 3


def test_every_arm_has_a_new_policy_made_from_the_same_parameters(tmp_path, monkeypatch):
    made = []

    def watching(policy, *, follow):
        made.append(policy)
        return watched(policy, follow=follow)

    monkeypatch.setattr("kvaudit.replay.watched", watching)
    run = run_scripted(tmp_path / "run", TRACE, policies=("token-runs:m=2", "token-runs"), orders=2)
    assert {arm.policy for arm in run.arms()} == {"full-prefill", "token-runs:m=2", "token-runs"}
    assert [policy.m for policy in made] == [2] * 6 + [TokenRuns().m] * 6
    assert len({id(policy) for policy in made}) == 12


def test_the_first_engine_is_gone_before_the_second_opens(tmp_path):
    opened = []

    def open_one(settings):
        assert [engine() for engine in opened] == [None] * len(opened)
        engine = Watched(settings, [])
        opened.append(weakref.ref(engine))
        return engine

    run_scripted(tmp_path / "run", TRACE, open_engine=open_one)
    assert len(opened) == 2


def test_the_engine_is_closed_after_a_failure(tmp_path):
    log = []

    def fail(served):
        raise ValueError("broken")

    with pytest.raises(EngineError):
        run_scripted(tmp_path / "run", TRACE, open_engine=lambda s: Watched(s, log, fail))
    assert log[-1] == "close"


def test_an_engine_that_does_not_open_is_named_and_nothing_is_written(tmp_path):
    def broken(settings):
        raise OSError("libcuda.so not found")

    with pytest.raises(EngineError, match=r"engine 'scripted' cannot be opened: OSError: libcuda.so not found"):
        run_scripted(tmp_path / "run", TRACE, open_engine=broken)
    with pytest.raises(UsageError, match="unknown model"):
        run_scripted(tmp_path / "run", TRACE, open_engine=lambda s: (_ for _ in ()).throw(UsageError("unknown model")))
    assert not (tmp_path / "run").exists()


def test_an_engine_without_policies_is_refused(tmp_path):
    class Server(Watched):
        capabilities = Capabilities(policies=False, max_prompt_tokens=None)

    with pytest.raises(UsageError, match=r"engine 'scripted' takes no recomputation policy \(none, token-topk\)"):
        run_scripted(tmp_path / "run", TRACE, open_engine=lambda s: Server(s, []))
    assert not (tmp_path / "run").exists()


def test_a_policy_that_needs_what_the_engine_does_not_give_is_refused(tmp_path):
    message = r"^policy 'cacheclip' needs auxiliary-attention, which engine 'scripted' does not give \(leave the policy"
    with pytest.raises(UsageError, match=message):
        run_scripted(tmp_path / "run", TRACE, policies=("none", "cacheclip"))
    assert not (tmp_path / "run").exists()


def test_a_trace_that_does_not_fit_is_refused_before_the_first_arm(tmp_path):
    with pytest.raises(UsageError, match="more than the 30 that the model takes"):
        run_scripted(tmp_path / "run", TRACE, scripted_settings(context="30"))
    assert not (tmp_path / "run").exists()


def test_nothing_is_opened_when_every_arm_is_there(tmp_path):
    replayed(tmp_path / "run")
    _, log = replayed(tmp_path / "run")
    assert log == []


def test_the_second_full_prefill_gets_a_fresh_engine_after_an_interruption_too(tmp_path):
    with pytest.raises(EngineError):
        failing(tmp_path, ValueError("x"), at=6)
    _, log = replayed(tmp_path / "run")
    assert log[:3] == ["open", "reset", ("r0", "request", None, True)]
    assert log.count("open") == 1


def test_a_run_does_not_go_on_with_other_weights(tmp_path):
    class Retrained(Watched):
        def describe(self):
            return {**self._engine.describe(), "weights": "other"}

    with pytest.raises(EngineError):
        failing(tmp_path, ValueError("x"))
    with pytest.raises(RunError, match="begun with another engine: weights was None, is other"):
        run_scripted(tmp_path / "run", TRACE, policies=("none",), orders=2, open_engine=lambda s: Retrained(s, []))


def test_entries_that_a_reset_leaves_are_recorded(tmp_path):
    class Leaky(Watched):
        def reset(self):
            super().reset()
            return CacheState(3, 100)

    run = run_scripted(tmp_path / "run", TRACE, open_engine=lambda s: Leaky(s, []))
    by_control = {
        control: [row["cache_entries_before"] for row in observations(run, f"none.chronological{control}")]
        for control in ("", ".reset", ".repeat")
    }
    assert by_control == {"": [3, None, None, None], ".reset": [3, 3, 3, 3], ".repeat": [3, None, None, None]}


def test_a_policy_that_leaves_the_program_is_an_error_and_no_success(tmp_path, monkeypatch):
    def leaves(self, context):
        raise SystemExit(0)

    monkeypatch.setattr(RecomputeAll, "select", leaves)
    with pytest.raises(EngineError, match=r"arm all.chronological, request 'r\d': SystemExit: 0"):
        run_scripted(tmp_path / "run", TRACE, policies=("all",))


def test_an_engine_that_is_another_when_it_is_opened_again_is_refused(tmp_path):
    """Between the two runs of full prefill it is opened anew: a server may have been changed meanwhile."""
    versions = iter(["1.0", "2.0"])

    class Versioned(Watched):
        def __init__(self, settings):
            super().__init__(settings, [])
            self._version = next(versions)

        def describe(self):
            return {**self._engine.describe(), "version": self._version}

    with pytest.raises(EngineError, match=r"not what it was when the replay began: version was 1\.0, is 2\.0"):
        run_scripted(tmp_path / "run", TRACE, policies=("none",), orders=2, open_engine=Versioned)
