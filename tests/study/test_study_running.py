"""Running a study: what is shared, what is kept, what is refused."""

import shutil
import weakref
from functools import partial

import orjson
import pytest
from fakes import rolling_trace, run_scripted
from studies import TRACE, faulty_under, refusing, run_study

from kvaudit.engines.scripted import ScriptedEngine
from kvaudit.errors import EngineError, RunError, UsageError
from kvaudit.replay import replay
from kvaudit.store import open_run
from kvaudit.study import running
from kvaudit.study.folder import STUDY, read_study
from kvaudit.study.results import Failure, read_results

FULL = ("full-prefill.chronological", "full-prefill.chronological.repeat")
REQUESTS = len(TRACE.requests)
ARMS = 2 + 2 + 2
"""token-topk's in two orders: the orders, reset and repeat, and the rounding control of both."""
ALL_ARMS = 2 + 7 * ARMS


class KilledError(BaseException):
    """Ends a study like a kill, without anyone having a say."""


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "s"
    run_study(path)
    return path


@pytest.fixture
def finished(finished_study, tmp_path):
    """A finished study of budgets, for a test of its own."""
    return shutil.copytree(finished_study, tmp_path / "s")


class Counting:
    """Opens scripted engines and counts what each served, full prefill apart; fails at serve `at`."""

    def __init__(self, at=None, error=None):
        self.opened, self.full, self.reusing = 0, 0, 0
        self._at, self._error = at, error or ValueError("the planted stop")

    def __call__(self, settings):
        self.opened += 1
        counting = self

        class Engine(ScriptedEngine):
            def serve(self, request_id, part, prompt, sampling, policy, reference=None):
                counting.count(policy)
                return super().serve(request_id, part, prompt, sampling, policy, reference)

        return Engine(settings)

    def count(self, policy):
        if policy is None:
            self.full += 1
        else:
            self.reusing += 1
        if self.full + self.reusing == self._at:
            raise self._error


def cell(path, name):
    return open_run(path / "cells" / name)


def observations(run, *arms):
    return [row for row in run.table("observations").to_pylist() if row["arm_id"] in arms]


def test_full_prefill_runs_in_one_cell_and_is_in_all(tmp_path):
    engine = Counting()
    run_study(tmp_path / "s", open_engine=engine)
    assert engine.full == 2 * REQUESTS
    assert engine.reusing == 7 * ARMS * REQUESTS
    first = cell(tmp_path / "s", "1-percent")
    for ratio in (2, 5, 10, 15, 20, 50):
        other = cell(tmp_path / "s", f"{ratio}-percent")
        other.check()
        assert observations(other, *FULL) == observations(first, *FULL)
        assert other.table("references") == first.table("references")
        assert other.stamp != first.stamp


def test_a_copy_is_marked_and_a_measurement_is_not(finished):
    origin = {"settings_digest": cell(finished, "1-percent").stamp.settings_digest, "folder": "1-percent"}
    assert cell(finished, "2-percent").manifest["shared"] == dict.fromkeys(FULL, origin)
    assert cell(finished, "50-percent").manifest["shared"] == dict.fromkeys(FULL, origin), "no copy of a copy"
    assert "shared" not in cell(finished, "1-percent").manifest


def test_a_cell_is_what_the_same_replay_alone_would_be(tmp_path):
    """Sharing changes nothing: a cell has the tables of an audit that computed its own full prefill."""
    run_study(tmp_path / "all")
    run_study(tmp_path / "alone", fixed=("recompute_ratio",))
    shared, alone = cell(tmp_path / "all", "50-percent"), cell(tmp_path / "alone", "cell")
    assert shared.stamp == alone.stamp
    for table in ("requests", "observations", "references", "selections", "provenance", "writes", "summary"):
        assert shared.table(table) == alone.table(table)
    assert shared.manifest["engine"] == alone.manifest["engine"]


def test_engines_are_opened_once_a_cell_and_once_more_for_the_repeat(tmp_path):
    engine = Counting()
    run_study(tmp_path / "s", open_engine=engine)
    assert engine.opened == 7 + 1


def test_the_last_engine_is_held_until_the_next_is_there_but_for_the_repeat(tmp_path):
    alive, seen = [], []

    def open_engine(settings):
        seen.append(sum(engine() is not None for engine in alive))
        engine = ScriptedEngine(settings)
        alive.append(weakref.ref(engine))
        return engine

    run_study(tmp_path / "s", open_engine=open_engine)
    assert seen == [0, 0, *[1] * 6]


def test_the_same_study_goes_on_where_it_was_killed(tmp_path):
    whole = Counting()
    run_study(tmp_path / "whole", open_engine=whole)
    before = Counting(at=(2 + ARMS + ARMS + 1) * REQUESTS + 3, error=KilledError())
    with pytest.raises(KilledError):
        run_study(tmp_path / "s", open_engine=before)
    after = Counting()
    results = run_study(tmp_path / "s", open_engine=after)
    assert after.full == 0
    assert before.reusing + after.reusing == whole.reusing + 3
    assert not results.missing
    for ratio in (1, 2, 5, 50):
        left, right = (cell(tmp_path / name, f"{ratio}-percent") for name in ("s", "whole"))
        assert left.table("observations") == right.table("observations")


@pytest.mark.parametrize("at", [3, REQUESTS + 3])
def test_a_study_killed_in_full_prefill_computes_it_anew(tmp_path, at):
    with pytest.raises(EngineError):
        run_study(tmp_path / "s", open_engine=Counting(at=at))
    again = Counting()
    results = run_study(tmp_path / "s", open_engine=again)
    assert again.full == (2 if at == 3 else 1) * REQUESTS
    assert results.exit_code == 0


def test_an_interrupt_between_copy_and_first_arm_loses_nothing(tmp_path):
    """The cell has its copies and no engine yet: it is an unfinished run, and goes on."""
    with pytest.raises(KilledError):
        run_study(tmp_path / "s", open_engine=Counting(at=(2 + ARMS) * REQUESTS + 1, error=KilledError()))
    begun = cell(tmp_path / "s", "2-percent")
    assert {arm.arm_id for arm in begun.arms() if arm.finished} == set(FULL)
    begun.check()
    found = read_results(tmp_path / "s")
    assert found.exit_code == 4
    assert found.missing == tuple(f"{ratio}-percent" for ratio in (5, 10, 15, 20, 50))
    assert run_study(tmp_path / "s").exit_code == 0


def test_nothing_is_served_when_everything_is_there(finished):
    engine = Counting()
    again = run_study(finished, open_engine=engine)
    assert engine.opened == 0
    assert [row.fidelity for row in again.rows] == [row.fidelity for row in read_results(finished).rows]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"trace": rolling_trace(6, window=3)}, "trace"),
        ({"kind": "switches"}, "kind, axes"),
        ({"policies": ("none",)}, "policies"),
        ({"orders": 3}, "orders"),
        ({"gap": "store"}, "switches"),
        ({"fixed": ("recompute_ratio",)}, "axes"),
    ],
)
def test_another_study_in_the_folder_is_refused(finished, change, told):
    before = {file: file.stat().st_mtime_ns for file in (finished).rglob("*") if file.is_file()}
    with pytest.raises(RunError, match=rf"holds another study, of rolling.jsonl \(changed: {told}"):
        run_study(finished, **change)
    assert {file: file.stat().st_mtime_ns for file in (finished).rglob("*") if file.is_file()} == before


def test_force_replaces_another_study_and_leaves_nothing_of_it(finished):
    (finished / "cells" / "1-percent" / "notes.txt").write_text("mine")
    run_study(finished, "disciplines", force=True)
    names = {folder.name for folder in (finished / "cells").iterdir()}
    assert {planned["name"] for planned in read_study(finished)["cells"]} == names - {"1-percent"}
    assert [file.name for file in (finished / "cells" / "1-percent").iterdir()] == ["notes.txt"]


def test_force_runs_the_same_study_anew(finished):
    engine = Counting()
    run_study(finished, open_engine=engine, force=True)
    assert engine.full == 2 * REQUESTS


def test_a_forced_study_that_stops_has_nothing_of_the_one_before(finished):
    with pytest.raises(KilledError):
        run_study(finished, open_engine=Counting(at=3 * REQUESTS + 1, error=KilledError()), force=True)
    assert [folder.name for folder in (finished / "cells").iterdir()] == ["1-percent"]
    assert run_study(finished).exit_code == 0


def test_a_forced_study_whose_engine_does_not_open_changes_nothing(finished):
    before = read_study(finished)
    with pytest.raises(UsageError, match="no bottom-right"):
        run_study(finished, "policies", open_engine=refusing(mask="bottom-right"), force=True)
    assert read_study(finished) == before
    assert read_results(finished).exit_code == 0


@pytest.mark.parametrize("name", [STUDY, "manifest.json"])
def test_somebody_elses_file_of_that_name_is_left_alone_and_no_lock_beside_it(tmp_path, name):
    path = tmp_path / "s"
    path.mkdir()
    (path / name).write_text('{"format": "of somebody else"}')
    message = "is not kvaudit's" if name == STUDY else "is not a manifest of kvaudit's"
    run = run_study if name == STUDY else partial(run_scripted, trace=TRACE)
    with pytest.raises(RunError, match=message):
        run(path)
    assert [file.name for file in path.iterdir()] == [name]


@pytest.mark.parametrize("held", ["run", "file", "other"])
def test_what_is_no_study_is_left_alone(tmp_path, held):
    path = tmp_path / "s"
    if held == "run":
        run_study(tmp_path / "studied", "policies")
        shutil.copytree(tmp_path / "studied" / "cells" / "cell", path)
    elif held == "file":
        path.write_text("mine")
    else:
        (path / "cells" / "mine").mkdir(parents=True)
    with pytest.raises(RunError, match="is a file" if held == "file" else "holds no study"):
        run_study(path)


def test_a_study_that_cannot_begin_leaves_no_folder(tmp_path):
    with pytest.raises(UsageError, match="this engine has no bottom-right"):
        run_study(tmp_path / "s", open_engine=refusing(mask="bottom-right"))
    assert not (tmp_path / "s").exists()


def test_combinations_that_the_engine_refuses_are_skipped_and_said(tmp_path):
    told = []
    results = run_study(tmp_path / "s", "switches", open_engine=refusing(gap="store"), told=told)
    assert len(results.described["refused"]) == 8
    assert sum("skipped, since the engine refuses it: this engine has no store" in line for line in told) == 8
    assert results.missing == ()
    assert {row.cell.switches.gap for row in results.rows} == {"recompute", "zero"}
    assert read_study(tmp_path / "s")["refused"] == results.described["refused"]
    assert not any("store" in folder.name for folder in (tmp_path / "s" / "cells").iterdir())


def test_a_study_that_another_engine_began_is_refused(finished):
    """Also where no cell has begun that could tell: its full prefill would be another engine's."""
    shutil.rmtree(finished / "cells" / "5-percent")
    with pytest.raises(RunError, match="was begun with another engine: fault was none, is position under"):
        run_study(finished, open_engine=faulty_under("position"))
    assert not (finished / "cells" / "5-percent").exists()


def test_a_changed_study_is_not_read(tmp_path):
    run_study(tmp_path / "s", "policies")
    described = orjson.loads((tmp_path / "s" / STUDY).read_bytes())
    described["cells"][0]["recompute_ratio"] = 0.3
    (tmp_path / "s" / STUDY).write_bytes(orjson.dumps(described))
    with pytest.raises(RunError, match="was changed"):
        read_results(tmp_path / "s")


def test_a_cell_of_another_study_is_not_read(finished, tmp_path):
    run_study(tmp_path / "other", "policies")
    shutil.rmtree(finished / "cells" / "5-percent")
    shutil.copytree(tmp_path / "other" / "cells" / "cell", finished / "cells" / "5-percent")
    with pytest.raises(RunError, match="5-percent belongs to another study"):
        read_results(finished)


def test_progress_counts_what_is_served_and_no_copies(tmp_path):
    class Listening:
        def __init__(self):
            self.begun, self.arms, self.serves = [], [], 0

        def begin(self, total, done):
            self.begun.append((total, done))

        def arm(self, arm_id, number, arms):
            self.arms.append((arm_id, number, arms))

        def served(self):
            self.serves += 1

    told, heard = [], Listening()
    run_study(tmp_path / "s", progress=heard, told=told)
    assert heard.serves == ALL_ARMS * REQUESTS
    assert heard.begun == [(ALL_ARMS * REQUESTS, (2 * (cell > 0) + ARMS * cell) * REQUESTS) for cell in range(7)]
    assert [number for _, number, _ in heard.arms] == list(range(1, ALL_ARMS + 1))
    assert heard.arms[0] == ("1-percent: full-prefill.chronological", 1, ALL_ARMS)
    (estimate,) = told
    assert f"for the {ALL_ARMS - 1} arms that are left" in estimate


def test_a_stop_between_the_copies_and_the_engines_first_word_is_a_cell_to_come(tmp_path, monkeypatch):
    calls = []

    def stopping(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return replay(*arguments)

    monkeypatch.setattr(running, "replay", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_study(tmp_path / "s")
    assert (tmp_path / "s" / "cells" / "2-percent" / "manifest.json").exists()
    assert read_results(tmp_path / "s").missing[0] == "2-percent"
    monkeypatch.undo()
    assert run_study(tmp_path / "s").exit_code == 0


class FailingUnder:
    """Opens scripted engines that break under one policy, where a switch or the ratio has a value."""

    def __init__(self, policy, **settings):
        self._policy, self._settings, self.served = policy, settings, []

    def __call__(self, settings):
        fails = all(getattr(settings, name) == value for name, value in self._settings.items())
        under, served = self._policy, self.served

        class Engine(ScriptedEngine):
            def serve(self, request_id, part, prompt, sampling, policy, reference=None):
                name = None if policy is None else policy.name
                served.append(name)
                if fails and name == under:
                    raise ValueError("the planted failure")
                return super().serve(request_id, part, prompt, sampling, policy, reference)

        return Engine(settings)


POLICIES = ("random-token", "token-topk", "random-span")
WHY = "arm token-topk.chronological, request 'r0': ValueError: the planted failure"


def test_a_policy_that_fails_in_a_cell_leaves_the_others_and_the_other_cells_alone(tmp_path):
    told, whole = [], run_study(tmp_path / "whole", policies=POLICIES)
    failing = FailingUnder("token-topk", recompute_ratio=0.05)
    results = run_study(tmp_path / "s", policies=POLICIES, open_engine=failing, told=told)
    assert results.failed == (Failure("5-percent", "token-topk", WHY),)
    assert f"5-percent: policy token-topk failed and is left out: {WHY}" in told
    kept = [row for row in whole.rows if (row.cell.name, row.policy) != ("5-percent", "token-topk")]
    assert [(row.cell, row.policy, row.fidelity) for row in results.rows] == [
        (row.cell, row.policy, row.fidelity) for row in kept
    ]
    assert not any(row.reasons for row in results.rows)
    assert (results.missing, results.exit_code) == ((), 3)
    read = read_results(tmp_path / "s")
    assert (read.failed, read.exit_code, len(read.rows)) == (results.failed, 3, len(kept))
    left, right = (cell(tmp_path / name, "5-percent") for name in ("s", "whole"))
    left.check()
    arms = [arm.arm_id for arm in right.arms() if arm.policy in ("random-token", "random-span")]
    assert observations(left, *arms) == observations(right, *arms) != []
    assert failing.served.count("random-token") == 7 * (ARMS - 2) * REQUESTS, "what was finished is not run again"
    assert (left.manifest["status"], right.manifest["status"]) == ("unfinished", "finished")


def test_what_failed_is_tried_again_and_nothing_else_is(tmp_path):
    run_study(tmp_path / "s", policies=POLICIES, open_engine=FailingUnder("token-topk", recompute_ratio=0.05))
    again = FailingUnder("nothing")
    results = run_study(tmp_path / "s", policies=POLICIES, open_engine=again)
    assert again.served == ["token-topk"] * ARMS * REQUESTS
    assert (results.failed, results.exit_code) == ((), 0)
    assert read_results(tmp_path / "s").failed == ()
    assert cell(tmp_path / "s", "5-percent").manifest["status"] == "finished"


def test_cells_are_held_against_the_full_prefill_of_one_in_which_every_policy_failed(tmp_path):
    failing = FailingUnder("token-topk", recompute_ratio=0.01)
    results = run_study(tmp_path / "s", open_engine=failing)
    assert results.failed == (Failure("1-percent", "token-topk", WHY),)
    assert failing.served.count(None) == 2 * REQUESTS
    assert [row.cell.name for row in results.rows] == [f"{ratio}-percent" for ratio in (2, 5, 10, 15, 20, 50)]


def test_an_error_that_is_no_failure_of_a_policy_stops_the_study(tmp_path, monkeypatch):
    run_study(tmp_path / "s")
    monkeypatch.setattr(running.RunFolder, "begin", lambda folder, engine: (_ for _ in ()).throw(RunError("full")))
    with pytest.raises(RunError, match="full"):
        run_study(tmp_path / "s", policies=POLICIES, force=True)


def test_progress_comes_to_its_end_without_the_arms_that_were_left_out(tmp_path):
    class Listening:
        def __init__(self):
            self.total, self.done, self.last = 0, 0, None

        def begin(self, total, done):
            self.total, self.done = total, done

        def arm(self, arm_id, number, arms):
            self.last = number, arms

        def served(self):
            self.done += 1

    heard = Listening()
    run_study(tmp_path / "s", open_engine=FailingUnder("token-topk", recompute_ratio=0.05), progress=heard)
    arms = 2 + 6 * ARMS
    assert (heard.total, heard.done, heard.last) == (arms * REQUESTS, arms * REQUESTS, (arms, arms))
