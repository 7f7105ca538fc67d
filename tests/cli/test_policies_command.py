"""`kvaudit policies new` and `kvaudit policies check`, and plug-ins of packages that are really installed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import rolling_trace, write_trace
from test_cli_start import COMMANDS, parsed

import kvaudit
from kvaudit import cli
from kvaudit.policies.checking import Check
from kvaudit.store import open_run

ROOT = Path(kvaudit.__file__).parents[1]
SCRIPTED = ["--engine", "scripted", "--orders", "2", "--recompute-ratio", "0.5", "-o", "run"]

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

import helpers
from kvaudit.policies import Policy


@dataclass(frozen=True)
class Mine(Policy):
    skip: int = 0

    name: ClassVar[str] = "mine"
    needs = frozenset()

    def select(self, context):
        return helpers.first(context)[: max(0, context.k - self.skip)]
"""
HELPERS = "def first(context):\n    return context.positions[: context.k]\n"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvaudit", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "helpers.py").write_text(HELPERS)
    write_trace(tmp_path / "rolling.jsonl", rolling_trace(4, window=3))
    return "./mine.py:Mine"


# check


def test_a_line_for_each_check_and_0_when_all_passed(run, mine):
    code, out, err = run("policies", "check", "token-runs:m=08", mine)
    assert (code, err) == (0, "")
    first, second = [line for line in out.splitlines() if not line.startswith("  ")]
    assert first == "token-runs:m=8 (kvaudit.policies.controls:TokenRuns)"
    assert second == "mine (./mine.py:Mine)"
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    assert len(lines) == 22
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert "  ok       extreme shapes: 110 requests" in lines


def test_1_and_the_smallest_request_when_one_failed(run, mine):
    code, out, err = run("policies", "check", f"{mine}:skip=1", "token-topk")
    assert (code, err) == (1, "")
    assert out.splitlines()[0] == "mine:skip=1 (./mine.py:Mine)"
    assert re.search(
        r"^  FAILED   exactly k .*: \"\S+\", k = 1: returned 0 positions, not k = 1; it was \[\]$", out, re.M
    )
    assert "token-topk (" in out, "the others are checked too"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("luck", "unknown policy 'luck'"),
        ("./nope.py:X", "there is no file nope.py"),
        ("./broken.py:X", "broken.py cannot be imported: SystemExit: 0 (line 2)"),
        ("json:JSONDecoder", "policy 'JSONDecoder' (json:JSONDecoder) is no subclass of kvaudit.policies.Policy"),
    ],
)
def test_2_and_one_line_when_it_cannot_be_loaded(run, mine, tmp_path, spec, message):
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(0)\n")
    code, out, err = run("policies", "check", mine, spec)
    assert (code, out) == (2, "")
    error, hint = err.splitlines()
    assert error.startswith("kvaudit: error: ")
    assert message in error
    assert hint.startswith("kvaudit: hint: ")


def test_what_a_policy_says_cannot_drive_the_terminal(run, mine, monkeypatch):
    monkeypatch.setattr(
        "kvaudit.policies.checking.checks", lambda make: [Check("x", True, "\x1b[31mred\nline", "w\x07")]
    )
    assert run("policies", "check", mine)[1].splitlines()[1:] == [r"  warning  x: \x1b[31mred\nline; w\x07"]


# new


def test_what_is_printed_can_be_run(run, tmp_path, mine):
    code, out, err = run("policies", "new", "my-policy", "-o", "my folder")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "Wrote my folder/my_policy.py and my folder/test_my_policy.py. Next:"
    commands = [shlex.split(line) for line in out.splitlines()[1:]]
    assert commands[1] == ["pytest", "my folder/test_my_policy.py"]
    for command in (commands[0], commands[2]):
        assert parsed(command) in COMMANDS
    assert run(*commands[0][1:])[0] == 0
    spec = commands[2][-1]
    assert run("replay", "rolling.jsonl", "--policy", f"{spec}:spread=1", *SCRIPTED)[0] == 0
    assert open_run(tmp_path / "run").manifest["policies"] == {
        "my-policy:spread=1.0": {"target": spec, "parameters": {"spread": "1.0"}}
    }


def test_nothing_is_overwritten(run, tmp_path):
    assert run("policies", "new", "my-policy")[0] == 0
    before = (tmp_path / "my_policy.py").read_bytes()
    code, out, err = run("policies", "new", "My_Policy")
    assert (code, out) == (2, "")
    assert err.startswith("kvaudit: error: my_policy.py is there already\n")
    assert (tmp_path / "my_policy.py").read_bytes() == before


# replay


def test_a_file_is_replayed_reported_and_gated_under_its_name(run, mine, tmp_path):
    code, out, err = run("replay", "rolling.jsonl", "--policy", mine, "--policy", "token-runs:m=2", *SCRIPTED)
    assert code == 0
    assert all(line.startswith("arm ") and "finished" in line for line in err.splitlines())
    assert sys.path == [entry for entry in sys.path if entry != str(tmp_path)]
    assert open_run(tmp_path / "run").manifest["settings"]["policies"] == ["mine", "token-runs:m=2"]
    code, out, _ = run("report", "run", "--min-fidelity", "0.1", "--policy", "token-runs:m=2")
    assert code in (0, 4)
    assert "token-runs:m=2" in out
    code, out, _ = run("report", "run", "--non-inferior", "token-runs:m=2,mine,0.5")
    assert code in (0, 4)


@pytest.mark.parametrize("changed", ["mine.py", "helpers.py"])
def test_a_changed_file_or_neighbour_is_another_audit(run, mine, tmp_path, changed):
    assert run("replay", "rolling.jsonl", "--policy", mine, *SCRIPTED)[0] == 0
    assert (
        "nothing was replayed" in run("replay", "rolling.jsonl", "--policy", f"{tmp_path}/mine.py:Mine", *SCRIPTED)[2]
    )
    with (tmp_path / changed).open("a") as file:
        file.write("# edited\n")
    code, out, err = run("replay", "rolling.jsonl", "--policy", mine, *SCRIPTED)
    assert (code, out) == (2, "")
    assert "run holds another audit, of rolling.jsonl (changed: policy sources)" in err


def test_a_policy_that_cannot_be_is_refused_before_a_folder_is_made(run, mine, tmp_path):
    for spec in (f"{mine}:skip=x", "token-runs:q=1", "./nope.py:X", f"{mine.replace('Mine', 'Yours')}"):
        code, out, err = run("replay", "rolling.jsonl", "--policy", spec, *SCRIPTED)
        assert (code, out, len(err.splitlines())) == (2, "", 2)
    assert not (tmp_path / "run").exists()


# Packages that are installed


def installed(place: Path, name: str, points: dict[str, str], source: str = "") -> None:
    """A distribution as an installer leaves it: a module and a folder of metadata."""
    (place / f"{name}.py").write_text(source)
    metadata = place / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {target}" for point, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[kvaudit.policies]", *lines]) + "\n")


@pytest.fixture
def kvaudit_with_packages(tmp_path):
    """The command in a process of its own, with what lies in `site` installed."""
    (tmp_path / "site").mkdir()

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")])}
        command = [sys.executable, "-m", "kvaudit", *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


THEIRS = '''
from dataclasses import dataclass
from typing import ClassVar

from kvaudit.policies import Policy


@dataclass(frozen=True)
class Theirs(Policy):
    """The first tokens of the prompt.

    More about it.
    """

    skip: int = 0

    name: ClassVar[str] = "theirs"

    def select(self, context):
        return context.positions[: context.k]
'''


def test_an_installed_package_brings_its_policy(kvaudit_with_packages, tmp_path):
    installed(tmp_path / "site", "their_package", {"theirs": "their_package:Theirs"}, THEIRS)
    code, out, _ = kvaudit_with_packages("policies")
    assert code == 0
    assert out.splitlines()[-1].split(maxsplit=1) == [
        "theirs",
        "The first tokens of the prompt; from their_package:Theirs; parameters: skip=0 [int]; needs deviation",
    ]
    code, out, _ = kvaudit_with_packages("policies", "check", "theirs:skip=1")
    assert code == 0
    assert out.startswith("theirs:skip=1 (their_package:Theirs)\n")
    write_trace(tmp_path / "rolling.jsonl", rolling_trace(4, window=3))
    assert kvaudit_with_packages("replay", "rolling.jsonl", "--policy", "theirs", *SCRIPTED)[0] == 0
    assert open_run(tmp_path / "run").manifest["settings"]["policies"] == ["theirs"]


def test_a_package_whose_object_is_no_policy_is_one_line_everywhere(kvaudit_with_packages, tmp_path):
    points = {"theirs": "their_package:VALUE", "gone": "their_package:Gone", "token-topk": "their_package:Other"}
    installed(tmp_path / "site", "their_package", points, "VALUE = 3\n")
    message = "policy 'theirs' (their_package:VALUE) is no subclass of kvaudit.policies.Policy"
    code, out, _ = kvaudit_with_packages("policies")
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()[-3:]] == [
        f"theirs BROKEN: {message}",
        "gone BROKEN: policy 'gone' (their_package:Gone) cannot be loaded: "
        "module 'their_package' has no attribute 'Gone'",
        "token-topk BROKEN: their_package:Other is ignored: the name is taken",
    ]
    write_trace(tmp_path / "rolling.jsonl", rolling_trace(4, window=3))
    for command in (("policies", "check", "theirs"), ("replay", "rolling.jsonl", "--policy", "theirs", *SCRIPTED)):
        code, out, err = kvaudit_with_packages(*command)
        assert (code, out) == (2, "")
        assert err.splitlines() == [f"kvaudit: error: {message}", "kvaudit: hint: derive it from that"]
