"""`kvaudit replay --study` and `kvaudit report STUDY` as a user meets them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from arm_progress import told_else, told_of_arms
from fakes import rolling_trace, write_trace

from kvaudit.study.folder import read_study

SCRIPTED = ("--engine", "scripted", "--orders", "2")
REQUESTS = 5


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "rolling.jsonl", rolling_trace(REQUESTS, window=3))


def cells(path):
    return {cell["name"]: cell for cell in read_study(path)["cells"]}


def test_a_study_says_what_it_will_do_and_what_it_found(kvaudit, trace, tmp_path):
    code, out, err = kvaudit("replay", trace, *SCRIPTED, "--study", "budgets", "-o", "s")
    assert code == 0
    first, estimate = told_else(err).splitlines()
    arms = 2 + 7 * 2 * (4 + 2)
    assert first == (
        f"study of budgets: 7 cells, {arms} arms of 5 requests: {arms * REQUESTS} serves, full prefill in the first "
        "cell only"
    )
    assert estimate.startswith("the first arm took ")
    assert [number for number, *_ in told_of_arms(err)] == list(range(1, arms + 1))
    assert told_of_arms(err)[-1] == (arms, arms, "50-percent: document-aligned.reversed.rounding")
    *told, verdict, command = out.splitlines()
    assert told[0].startswith("token-topk: from 1 % on every answer equals full prefill's")
    assert verdict == "Study: conclusive (7 cells; exit code 0)"
    assert command == "Report: kvaudit report s"
    code, report, _ = kvaudit(*shlex.split(command.removeprefix("Report: kvaudit ")))
    assert code == 0
    assert "Frontier of fidelity" in report
    assert kvaudit("report", tmp_path / "s" / "cells" / "5-percent")[0] == 0


def test_the_same_command_goes_on_in_its_own_folder(kvaudit, trace, tmp_path):
    first = kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "--policy", "none")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("rolling-policies-")
    assert kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "--policy", "none")[1] == first[1]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_options_that_are_given_fix_their_axis(kvaudit, trace, tmp_path):
    fixed = ("--mask", "exact", "--gap", "zero", "--lookup", "any", "--recompute-ratio", "0.3")
    kvaudit("replay", trace, *SCRIPTED, "--study", "switches", *fixed, "-o", "s", "--policy", "none")
    assert list(cells(tmp_path / "s")) == ["first-writer", "isolated"]
    assert {cell["switches"]["mask"] for cell in cells(tmp_path / "s").values()} == {"exact"}
    kvaudit("replay", trace, *SCRIPTED, "--study", "budgets", "--recompute-ratio", "0.15", "-o", "r")
    assert [cell["recompute_ratio"] for cell in cells(tmp_path / "r").values()] == [0.15]


def test_a_preset_sets_what_does_not_vary(kvaudit, trace, tmp_path):
    kvaudit("replay", trace, *SCRIPTED, "--study", "disciplines", "--like", "ideal", "--lookup", "any", "-o", "s")
    found = cells(tmp_path / "s")
    assert {cell["switches"]["suffix"] for cell in found.values()} == {"with-rows"}
    assert "isolated" in found


def test_a_study_of_policies_has_all_that_the_engine_can_serve(kvaudit, trace, tmp_path):
    code, _, err = kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "-o", "s")
    assert code == 0
    assert "oracle: left out, since it serves a request many times over; --policy oracle studies it\n" in err
    assert "cacheclip: left out, since it needs auxiliary-attention, which engine 'scripted' does not give\n" in err
    (cell,) = cells(tmp_path / "s").values()
    assert {"token-topk", "none", "all", "legolink"} <= set(cell["policies"])
    assert not {"oracle", "cacheclip"} & set(cell["policies"])


def test_a_study_is_held_to_no_limits(kvaudit, trace):
    kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "--policy", "none", "-o", "s")
    code, out, err = kvaudit("report", "s", "--min-fidelity", "0.9", "--policy", "none")
    assert (code, out) == (2, "")
    assert "a study is held to no limits: --min-fidelity, --policy" in err
    assert "kvaudit report s/cells/NAME" in err


def test_reports_go_to_files(kvaudit, trace, tmp_path):
    kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "--policy", "none", "-o", "s")
    code, out, _ = kvaudit("report", "s", "-o", "s.json", "-o", "s.csv")
    assert code == 0
    assert json.loads((tmp_path / "s.json").read_text())["kind"] == "policies"
    assert (tmp_path / "s.csv").read_text().startswith("cell,policy,")
    assert out.splitlines()[-1] == "Study: conclusive (1 cell; exit code 0)"
    code, out, err = kvaudit("report", "s", "--format", "html", "-o", "s.html")
    assert (code, out) == (2, "")
    assert "a study has no html report" in err
    assert kvaudit("report", "s", "-o", "s/x.json")[0] == 2


def test_an_inconclusive_study_ends_in_4(kvaudit, trace):
    fault = ("--option", "fault=no-reuse")
    code, out, _ = kvaudit("replay", trace, *SCRIPTED, *fault, "--study", "policies", "--policy", "none", "-o", "s")
    assert code == 4
    assert "Study: inconclusive (1 row of 1 inconclusive of 1 cell; exit code 4)" in out
    assert kvaudit("report", "s")[0] == 4
    assert kvaudit("report", "s", "--exit-zero")[0] == 0


BROKEN = """
from kvaudit.policies import Policy


class Broken(Policy):
    name = "broken"
    needs = frozenset()

    def select(self, context):
        if context.request_id == "r2":
            raise ValueError("planted")
        return context.positions[: context.k]
"""


def test_a_study_with_a_failed_policy_ends_in_3_and_says_where(kvaudit, trace, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    both = ("--policy", "./broken.py:Broken", "--policy", "none")
    code, out, err = kvaudit("replay", trace, *SCRIPTED, *both, "--study", "policies", "-o", "s")
    assert code == 3
    why = "arm broken.chronological, request 'r2': "
    assert f"cell: policy broken failed and is left out: {why}" in err
    assert not any("broken" in arm for *_, arm in told_of_arms(err))
    assert "Study: incomplete (broken failed in 1 of 1 cell; exit code 3)" in out
    code, out, _ = kvaudit("report", "s", "-o", "s.json")
    assert code == 3
    found = json.loads((tmp_path / "s.json").read_text())
    (failure,) = found["failed"]
    assert (failure["cell"], failure["policy"]) == ("cell", "broken")
    assert failure["why"].startswith(why)
    assert [row["policy"] for row in found["rows"]] == ["none"]
    code, out, _ = kvaudit("report", "s")
    assert code == 3
    assert f"cell: policy broken failed: {why}" in " ".join(out.split())
    code, _, err = kvaudit("report", "s", "--exit-zero")
    assert (code, err) == (0, "kvaudit: exit code 0 since --exit-zero is set; by the verdict it is 3\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--study", "masks"), "masks"),
        (("--study", "budgets", "--policy", "no-such"), "unknown policy 'no-such'"),
        (("--study", "budgets", "--lookup", "vllm-prefix"), "a study of budgets has no cell here"),
        (("--study", "budgets", "--orders", "1"), "1 order cannot show answer variation"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(kvaudit, trace, tmp_path, arguments, message):
    code, out, err = kvaudit("replay", trace, *SCRIPTED, *arguments, "-o", "s")
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "s").exists()


def test_a_run_and_a_study_do_not_take_each_others_folder(kvaudit, trace):
    kvaudit("replay", trace, *SCRIPTED, "-o", "run")
    assert kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "--policy", "none", "-o", "run")[0] == 2
    kvaudit("replay", trace, *SCRIPTED, "--study", "policies", "--policy", "none", "-o", "s")
    code, _, err = kvaudit("replay", trace, *SCRIPTED, "-o", "s")
    assert code == 2
    assert "holds no audit" in err


def test_an_interrupted_study_goes_on(kvaudit, trace, tmp_path):
    slow = ("--option", "delay-ms=20", "--policy", "none", "--policy", "token-topk")
    command = ["replay", trace, *SCRIPTED, *slow, "--study", "budgets", "-o", "s"]
    running = subprocess.Popen(
        [sys.executable, "-m", "kvaudit", *map(str, command)], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "s" / "cells" / "2-percent" / "observations").exists():
        assert running.poll() is None, running.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted: 1 of 7 cells are finished and kept in s" in err
    assert not list((tmp_path / "s").rglob("*.tmp"))
    code, out, _ = kvaudit("report", "s")
    assert code == 4
    assert "5-percent: not replayed yet; the same command goes on" in out
    code, out, _ = kvaudit(*command)
    assert code == 0
    assert "Study: conclusive" in out
