"""What a killed process leaves beside a trace is removed by the next one; what a living one writes is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvaudit.errors import TraceError
from kvaudit.traces.output import whole_file

WRITER = (
    "import sys, time; from pathlib import Path; from kvaudit.traces.output import whole_file\n"
    "with whole_file(Path(sys.argv[1])) as stream:\n"
    "    stream.write(b'theirs'); stream.flush(); print('writes', flush=True); sys.stdin.read()\n"
)


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def write(target: Path) -> None:
    with whole_file(target) as stream:
        stream.write(b"ours")


@pytest.fixture
def writer(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "t.jsonl")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writes\n"
    return process


def test_what_a_killed_process_left_is_removed(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    writer.kill()
    writer.communicate()
    assert hidden(tmp_path) == [f".t.jsonl.{writer.pid}.tmp"]

    write(tmp_path / "other.jsonl")
    assert len(hidden(tmp_path)) == 1

    write(tmp_path / "t.jsonl")
    assert hidden(tmp_path) == []
    assert (tmp_path / "t.jsonl").read_bytes() == b"ours"


def test_what_another_process_writes_is_left_alone(tmp_path: Path, writer: subprocess.Popen[str]) -> None:
    write(tmp_path / "t.jsonl")

    assert hidden(tmp_path) == [f".t.jsonl.{writer.pid}.tmp"]
    writer.communicate("")
    assert writer.returncode == 0
    assert (tmp_path / "t.jsonl").read_bytes() == b"theirs"
    assert hidden(tmp_path) == []


def test_a_file_of_a_process_that_had_the_same_id_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".t.jsonl.{os.getpid()}.tmp").write_bytes(b"left")

    write(tmp_path / "t.jsonl")

    assert (tmp_path / "t.jsonl").read_bytes() == b"ours"
    assert hidden(tmp_path) == []


def test_only_files_that_kvaudit_names_so_are_removed(tmp_path: Path) -> None:
    names = [".t.jsonl.x.tmp", ".t.jsonl.1.tmp.bak", ".u.jsonl.1.tmp", "t.jsonl.1.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".t.jsonl.2.tmp").mkdir()
    os.mkfifo(tmp_path / ".t.jsonl.3.tmp")

    write(tmp_path / "t.jsonl")

    assert {path.name for path in tmp_path.iterdir()} == {*names, ".t.jsonl.2.tmp", ".t.jsonl.3.tmp", "t.jsonl"}


def test_two_writers_of_one_process_do_not_take_each_others_file(tmp_path: Path) -> None:
    with whole_file(tmp_path / "t.jsonl") as stream:
        stream.write(b"first")
        with pytest.raises(TraceError, match="File exists"):
            write(tmp_path / "t.jsonl")

    assert (tmp_path / "t.jsonl").read_bytes() == b"first"
