import json
from pathlib import Path

import pytest
import typer
from audit_runs import arm_lines, full_prefill, run
from test_report import WORDS, sensitive, written
from typer.testing import CliRunner

from kvaudit.cli.compare import compare
from kvaudit.cli.report import report
from kvaudit.errors import RunError, UsageError

comparing, reporting = typer.Typer(), typer.Typer()
comparing.command()(compare)
reporting.command()(report)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def before(tmp_path) -> Path:
    lines = arm_lines("token-topk", {"chronological": WORDS, "reversed": WORDS}, WORDS, WORDS)
    return written(tmp_path / "before", run(full_prefill(WORDS) + lines))


@pytest.fixture
def now(tmp_path) -> Path:
    return written(tmp_path / "now", sensitive())


def invoke(*arguments, app=comparing):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_what_changed_is_shown(before, now):
    found = invoke(before, now)
    assert found.exit_code == 0
    assert found.stdout.startswith("Against the baseline")
    text = " ".join(found.stdout.split())
    assert "token-topk: was none seen, is history-sensitive." in text
    assert "4 requests have the same prompt in both runs; 0 only now, 0 only before." in text
    assert "reversed 100.0 % 25.0 % -75.0" in text
    assert "3 requests newly flip: r0, r1, r2; 0 requests no longer do." in text
    assert max(len(line) for line in found.stdout.splitlines()) <= 80


def test_the_direction_is_from_the_first_to_the_second(before, now):
    assert "0 requests newly flip; 3 requests no longer do: r0, r1, r2." in " ".join(invoke(now, before).stdout.split())


def test_the_same_as_data(before, now):
    data = json.loads(invoke(before, now, "--format", "json").stdout)["baseline"]
    assert data["flips"] == [{"policy": "token-topk", "newly": ["r0", "r1", "r2"], "no_longer": []}]
    assert (data["requests"], data["only_now"]) == (4, 0)
    change = next(row for row in data["changes"] if row["metric"] == "variation_change")
    assert (change["before"], change["now"], change["value"]) == (0, 0.75, 0.75)


def test_the_same_audit_again_changes_nothing(now, tmp_path):
    found = invoke(now, written(tmp_path / "again", sensitive()))
    assert found.exit_code == 0
    assert "0 requests newly flip; 0 requests no longer do." in found.stdout


def test_a_run_is_not_held_against_itself(now, tmp_path):
    (tmp_path / "link").symlink_to(now)
    for arguments in ((now, now), (now, tmp_path / "link")):
        assert isinstance(invoke(*arguments).exception, UsageError)
    assert isinstance(invoke(now, "--baseline", now, app=reporting).exception, UsageError)


def test_an_inconclusive_run_ends_so(before, tmp_path):
    broken = written(tmp_path / "broken", sensitive().unfinished("token-topk.chronological.repeat"))
    assert invoke(before, broken).exit_code == 4
    assert invoke(broken, before).exit_code == 4


def test_bad_runs_are_refused(before, tmp_path):
    for arguments in ((before, tmp_path / "missing"), (tmp_path / "missing", before)):
        found = invoke(*arguments)
        assert isinstance(found.exception, RunError)
        assert found.stdout == ""
    assert isinstance(invoke(before, before, "--format", "html").exception, UsageError)


def test_a_report_against_a_baseline_says_the_same(before, now):
    found = invoke(now, "--baseline", before, app=reporting)
    assert invoke(before, now).stdout in found.stdout
    data = json.loads(invoke(now, "--baseline", before, "-f", "json", app=reporting).stdout)
    assert data["baseline"] == json.loads(invoke(before, now, "-f", "json").stdout)["baseline"]


def test_gates_against_a_baseline_decide_the_exit_code(before, now):
    gates = ["--baseline", before, "--max-fidelity-drop"]
    assert invoke(now, *gates, "0.99", app=reporting).exit_code == 4
    assert invoke(now, *gates, "1", app=reporting).exit_code == 0
    assert isinstance(invoke(now, *gates[2:], "0.1", app=reporting).exception, UsageError)


def test_gates_in_a_file_hold(before, now, tmp_path, monkeypatch):
    (tmp_path / "kvaudit.toml").write_text("[gates]\nbaseline = 'before'\nmax-variation-rise = 1\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    found = invoke(now, app=reporting)
    assert found.exit_code == 0
    assert "pass: token-topk, answer variation at most 100 points above" in " ".join(found.stdout.split())
    assert invoke(now, "--max-variation-rise", "0.1", app=reporting).exit_code == 4
    assert "kvaudit.toml" in "".join(found.stdout.split())
