"""`kvaudit record import`, as a user calls it."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from click import unstyle
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.errors import KvauditError
from kvaudit.traces import read_trace

USER = {"role": "user", "content": "Hi"}
LINES = [
    {"id": "a", "session": "s", "messages": [USER], "max_tokens": 5},
    {"id": "b", "messages": [USER], "status": 500},
    {"id": "a", "messages": [USER]},
    {"id": "c", "messages": [USER], "status": 500},
    {"id": "d", "messages": [USER], "status": 500},
    {"id": "e", "messages": [USER], "status": 500},
    {"id": "f", "messages": [USER], "tools": [{"name": "x"}]},
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in LINES))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl.gz"


def run(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["record", "import", *map(str, arguments)], input=given)


def test_it_ends_with_what_came_in_and_what_was_left_out_and_why(log: Path, trace: Path) -> None:
    result = run(log, "-o", trace)

    assert result.exit_code == 0
    assert result.stdout == ""
    width = len(str(log))
    assert result.stderr.splitlines() == [
        f"{'read':<{width}}  format    records  requests  left out",
        f"{log}  messages        7         2         5",
        "  left out 4: failed (status 500) (line 2, line 4, line 5 and 1 more)",
        "  left out 1: has an id and a prompt that came before (line 3 (first in line 1))",
        "1 request with tools: definitions and calls are replayed as JSON text, not in the model's own tool template",
        "1 request sets no max_tokens: 16 are replayed (--max-tokens sets another limit)",
        f"wrote {trace}: 2 requests, 2 distinct segments, 1 session",
        f"next: kvaudit replay {trace} --orders 2",
    ]
    assert read_trace(trace).digest == read_trace(log).digest
    imported = read_trace(trace).header["imported"]
    assert imported[0]["left_out"][0]["count"] == 4  # type: ignore[index]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_standard_input_is_a_log(log: Path, trace: Path, compress: object) -> None:
    result = run("-", "-o", trace, given=compress(log.read_bytes()))  # type: ignore[operator]

    assert result.exit_code == 0
    assert read_trace(trace).digest == read_trace(log).digest
    assert "standard input  messages" in result.stderr


def test_a_parquet_export_comes_through_standard_input(tmp_path: Path, trace: Path) -> None:
    run_row = {"id": "a", "run_type": "llm", "inputs": '{"prompts": ["Once"]}'}
    pq.write_table(pa.Table.from_pylist([run_row]), tmp_path / "runs.parquet")

    result = run("-", "-o", trace, given=(tmp_path / "runs.parquet").read_bytes())

    assert "standard input  langsmith" in result.stderr
    assert read_trace(trace).requests[0].segments[0].text == "Once"


def test_the_format_can_be_named(log: Path, trace: Path) -> None:
    assert run(log, "--format", "auto", "-o", trace).exit_code == 0
    assert run(log, "--format", "messages", "-o", trace).exit_code == 0

    error = run(log, "--format", "har", "-o", trace).exception
    assert isinstance(error, KvauditError)
    assert "is not a har trace" in error.message
    error = run(log, "--format", "xml", "-o", trace).exception
    assert isinstance(error, KvauditError)
    assert str(error.hint).endswith("har, mooncake, weka")


def test_a_folder_with_many_files_is_told_by_format(tmp_path: Path, trace: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number:02}.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in LINES[1:3]))
    (folder / "notes.txt").write_text("Notes.\n")

    result = run(folder, "-o", trace)

    assert [line.split() for line in result.stderr.splitlines()[:3]] == [
        ["read", "format", "records", "requests", "left", "out"],
        ["1", "file", "-", "0", "0", "0"],
        ["25", "files", "messages", "50", "1", "49"],
    ]
    assert "  left out 25: failed (status 500) (00.jsonl line 1, 01.jsonl line 1, 02.jsonl line 1 and 22 more)" in (
        result.stderr.splitlines()
    )
    assert "  left out 1: file: in no known trace format: line 1: broken JSON at character 1" in result.stderr


def test_a_trace_that_is_written_into_the_folder_is_not_imported_again(log: Path) -> None:
    output = log.with_name("trace.jsonl")

    for _ in range(2):
        result = run(log.parent, "-o", output)

        assert result.stderr.splitlines()[-2].startswith(f"wrote {output}: 2 requests, ")
        assert f"\n{output} " not in result.stderr


def test_what_a_log_holds_is_not_obeyed_by_a_terminal(tmp_path: Path, trace: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(orjson.dumps({"id": "x\x1b[2J", "messages": [USER]}))

    result = run(tmp_path / "a", tmp_path / "b", "-o", trace)

    assert "came before in another file (b line 1 (x\\x1b[2J))" in result.stderr
    assert "\x1b" not in result.stderr


def test_notes_of_several_files_are_told_once(tmp_path: Path, trace: Path) -> None:
    times = [{"id": name, "call_type": "completion", "startTime": -at} for at, name in enumerate("ab")]
    for number in range(5):
        lines = [{**line, "id": f"{number}{line['id']}", "messages": [USER], "tools": [{}]} for line in times]
        tools = [{**line, "model_parameters": {"tools": [{"name": "x"}]}, "response": ""} for line in lines]
        (tmp_path / f"log{number}").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in tools))

    result = run(*(tmp_path / f"log{number}" for number in range(5)), "-o", trace)

    assert result.stderr.splitlines()[6:10] == [
        "log0, log1, log2 and 2 more: requests are sorted by their times, which are not in order in the log",
        "requests are sorted by their times, which are not in order in the files",
        "10 requests with tools: definitions and calls are replayed as JSON text, not in the model's own tool template",
        "10 logged answers without text; the requests are kept",
    ]


def test_nothing_is_written_where_an_error_is_told(log: Path, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gz").write_bytes(gzip.compress(log.read_bytes())[:12])
    (tmp_path / "hashes").write_text('{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}\n')

    for name, words in [("broken.gz", "line"), ("hashes", "no answer can be audited"), ("missing", "no such file")]:
        error = run(log, tmp_path / name, "-o", trace).exception
        assert isinstance(error, KvauditError)
        assert error.message.startswith(str(tmp_path / name))
        assert words in error.message
    assert not trace.exists()


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_log_is_not_replaced_by_its_trace(log: Path, tmp_path: Path, through_a_link: bool) -> None:
    before, output = log.read_bytes(), log
    if through_a_link:
        output = tmp_path / "link.jsonl"
        output.symlink_to(log)
    result = run(log, "-o", output)
    assert isinstance(result.exception, KvauditError)
    assert result.exception.message == f"{output} is read, and would be replaced"
    assert log.read_bytes() == before


def test_replay_says_what_it_leaves_out_of_a_log(log: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(log), "--engine", "scripted", "-o", str(tmp_path / "run")])

    assert "left out 4 failed (status 500): line 2, line 4, line 5 and 1 more\n" in result.stderr
    assert "1 request with tools: " in result.stderr


def test_replay_tells_nothing_of_what_the_header_of_a_trace_holds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"kvaudit_trace": 1, "left_out": 5, "notes": 7, "with_tools": "x"}\n'
        '{"request": "a", "segments": [{"kind": "query", "text": "Hi"}], "max_tokens": 3}\n'
    )

    result = CliRunner().invoke(app, ["replay", str(trace), "--engine", "scripted", "-o", str(tmp_path / "run")])

    assert not isinstance(result.exception, TypeError)
    assert "left out" not in result.stderr


def test_help_lists_the_formats_and_loads_nothing_heavy() -> None:
    text = unstyle(run("--help").output)
    for name in ("messages", "openai-batch", "langsmith", "har", "mooncake"):
        assert f"{name}: " in text
    assert "the model's own tool template" in " ".join(text.split())

    check = (
        "import sys, kvaudit.cli.record_import; print([m for m in ('pyarrow', 'orjson', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
