"""`kvaudit record import` of damaged files, as a user sees it."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import orjson
import pytest
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.errors import KvauditError
from kvaudit.traces import read_trace


def chat(name: str, text: str = "Hi") -> bytes:
    return orjson.dumps({"id": name, "messages": [{"role": "user", "content": text}]}) + b"\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def run(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["record", "import", *map(str, arguments)], input=given)


def test_broken_lines_are_counted_in_the_closing_table(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "log").write_bytes(chat("a") + b"{\n" + chat("b") + b'{"id": \n')

    result = run(tmp_path / "log", "-o", trace)

    assert result.exit_code == 0
    rows = result.stderr.splitlines()
    assert rows[1].split()[1:] == ["messages", "4", "2", "2"]
    assert rows[2].startswith("  left out 2: broken JSON (line 2 (character 2: ")
    assert ", line 4 (character " in rows[2]


def test_a_cut_off_file_is_said_to_be_one(tmp_path: Path, trace: Path) -> None:
    whole = gzip.compress(b"".join(chat(str(n), Random(n).randbytes(4000).hex()) for n in range(20)))
    (tmp_path / "log.gz").write_bytes(whole[: len(whole) // 2])

    result = run(tmp_path / "log.gz", "-o", trace)

    assert result.exit_code == 0
    kept = len(read_trace(trace).requests)
    assert 0 < kept < 20
    assert (
        f"log.gz: the compressed file is cut off behind line {kept}: what stands before that is read"
        in result.stderr.splitlines()
    )


def test_files_of_a_folder_that_cannot_be_read_are_named(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "sound").write_bytes(chat("a"))
    (tmp_path / "logs" / "packed").write_bytes(b"PK\x03\x04")
    (tmp_path / "logs" / "also").write_bytes(b"PK\x03\x04")

    result = run(tmp_path / "logs", "-o", trace)

    assert result.exit_code == 0
    assert "  left out 2: files: a zip archive: unpack it first (also, packed)" in result.stderr.splitlines()


def test_a_file_that_is_named_and_cannot_be_read_is_an_error(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "packed").write_bytes(b"PK\x03\x04")

    error = run(tmp_path / "packed", "-o", trace).exception

    assert isinstance(error, KvauditError)
    assert (error.message, error.exit_code) == (f"{tmp_path / 'packed'} is a zip archive: unpack it first", 2)
    assert not trace.exists()


def test_standard_input_is_called_that_in_everything_that_is_said(tmp_path: Path, trace: Path) -> None:
    error = run("-", "-o", trace, given=b"PK\x03\x04").exception
    assert isinstance(error, KvauditError)
    assert error.message == "standard input is a zip archive: unpack it first"

    (tmp_path / "input").write_bytes(b'{"custom_id": "a", "body": {"messages": [{"role": "user", "content": "Hi"}]}}\n')
    results = b'{"custom_id": "a", "response": {"status_code": 200}}\n'
    result = run(tmp_path / "input", "-", "-o", trace, given=results)
    assert "standard input: holds results, no prompts" in result.stderr.splitlines()


def test_the_trace_remembers_how_each_of_its_files_was_made(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "log").write_bytes(chat("a", "write to someone@example.org"))
    (tmp_path / "other").write_bytes(chat("b"))
    for name, options in (("log", ["--redact-only", "email"]), ("other", [])):
        assert run(tmp_path / name, "-o", tmp_path / f"{name}.jsonl", *options).exit_code == 0

    result = run(tmp_path / "log.jsonl", tmp_path / "other.jsonl", "-o", trace)

    assert "the files differ in how they were made (redacted): the header tells it of each file" in result.stderr
    header = read_trace(trace).header
    assert "redacted" not in header
    first, second = header["imported"]  # type: ignore[misc]
    assert first["header"]["redacted"][0]["detectors"] == ["email"]
    assert "redacted" not in second["header"]
