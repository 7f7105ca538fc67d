"""What `kvaudit policies new` writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvaudit
from kvaudit.errors import UsageError
from kvaudit.policy_specs import read_policy
from kvaudit.policy_specs.starting import write_new

ROOT = Path(kvaudit.__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "module", "class_name", "listed"),
    [
        ("my-policy", "my_policy", "MyPolicy", "my-policy"),
        ("my_policy", "my_policy", "MyPolicy", "my-policy"),
        ("MyPolicy", "my_policy", "MyPolicy", "my-policy"),
        ("HTTPGap2", "http_gap2", "HttpGap2", "http-gap2"),
        ("a1", "a1", "A1", "a1"),
        ("gap 2 of 3", "gap_2_of_3", "Gap2Of3", "gap-2-of-3"),
        ("class-x", "class_x", "ClassX", "class-x"),
    ],
)
def test_a_name_becomes_a_file_a_class_and_a_listed_name(tmp_path, name, module, class_name, listed):
    written = write_new(name, tmp_path / "new folder")
    assert {path.name for path in (tmp_path / "new folder").iterdir()} == {f"{module}.py", f"test_{module}.py"}
    assert written.spec == f"{tmp_path}/new folder/{module}.py:{class_name}"
    assert read_policy(written.spec).name == listed
    assert read_policy(f"{written.spec}:spread=1").name == f"{listed}:spread=1.0"


@pytest.mark.parametrize("name", ["", "1st", "-x", "x-", "a--b", "a/b", "../a", "é", "a.b", "a:b", "x" * 65, "aB" * 40])
def test_a_name_that_cannot_be_one_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="cannot name a policy"):
        write_new(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["class", "import", "json", "numpy", "kvaudit", "policy", "Positions", "selection-context"]
)
def test_a_file_or_class_that_would_hide_another_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="would hide another"):
        write_new(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["token-topk", "TokenTopk", "full_prefill"])
def test_a_name_that_is_taken_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="there is a policy"):
        write_new(name, tmp_path)


@pytest.mark.parametrize("there", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, there):
    (tmp_path / there).write_text("kept")
    with pytest.raises(UsageError, match=f"{there} is there already"):
        write_new("mine", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "kept"


def test_a_path_in_the_current_folder_is_written_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert write_new("mine", Path()).spec == "./mine.py:Mine"
    assert write_new("mine", Path("-x")).spec == "./-x/mine.py:Mine"


def ran(*arguments: object, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], env=environment, cwd=folder, capture_output=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def test_what_is_written_passes_its_own_test_and_ruff(tmp_path):
    write_new("my-policy", tmp_path)
    assert "4 passed" in ran("pytest", "-p", "no:cacheprovider", folder=tmp_path)
    for tool in (("check",), ("format", "--check")):
        ran("ruff", *tool, "--no-cache", "--config", ROOT / "pyproject.toml", tmp_path, folder=tmp_path)
        ran("ruff", *tool, "--no-cache", "--isolated", "--line-length", "120", tmp_path, folder=tmp_path)


@pytest.mark.slow
def test_what_is_written_passes_mypy_strict(tmp_path):
    written = write_new("my-policy", tmp_path)
    environment = {**os.environ, "MYPYPATH": str(tmp_path)}
    command = ["-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(written.policy), str(written.test)]
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_test_that_is_written_fails_when_the_policy_breaks(tmp_path):
    written = write_new("mine", tmp_path)
    source = written.policy.read_text()
    written.policy.write_text(
        source.replace("context.positions[np.concatenate((spread, rest))]", "context.positions[:1]")
    )
    assert written.policy.read_text() != source
    with pytest.raises(AssertionError, match="4 failed"):
        ran("pytest", "-p", "no:cacheprovider", folder=tmp_path)
