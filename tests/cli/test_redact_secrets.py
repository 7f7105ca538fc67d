"""`kvaudit inspect --secrets`, as a user calls it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import orjson
import pytest
from redaction.sensitive_values import KEYS
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.cli.redacting import NOT_LOOKED_FOR
from kvaudit.errors import KvauditError

KEY = KEYS["Anthropic key"]
FIXTURE = Path(__file__).parents[2] / "fixtures" / "rolling.jsonl.gz"
EXCHANGE = {
    "exchange": "r1-1",
    "api": "chat",
    "request_raw": '{"user": "bob@example.com"}',
    "request": {"messages": [{"role": "user", "content": "Hello"}]},
    "headers": {"x-forwarded-for": "10.1.2.3"},
}


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "capture.jsonl"
    path.write_bytes(orjson.dumps({"kvaudit_capture": 1}) + b"\n" + orjson.dumps(EXCHANGE) + b"\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    log = tmp_path / "log.jsonl"
    lines = [{"messages": [{"role": "user", "content": text}]} for text in (f"Use {KEY}.", "Nothing.")]
    log.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    path = tmp_path / "trace.jsonl.gz"
    assert CliRunner().invoke(app, ["record", "import", str(log), "-o", str(path)]).exit_code == 0
    return path


def run(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["inspect", "--secrets", *map(str, arguments)], input=given)


def test_a_trace_with_a_key_is_not_to_be_shared(trace: Path) -> None:
    result = run(trace)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{trace}: do not share this file as it is (2 requests)",
        "detector   values   places  requests",
        "key             1        1         1",
        "  sk... (108 characters)  request 'line-1', segment 1",
        f"The detectors can miss things: {NOT_LOOKED_FOR}.",
        f"next: kvaudit record import {trace} --redact -o redacted.jsonl.gz",
    ]


def test_what_a_capture_holds_beside_its_prompts_is_found(capture: Path) -> None:
    result = run(capture)
    assert result.stdout.splitlines()[:6] == [
        f"{capture}: do not share this file as it is (2 lines)",
        "detector   values   places     lines",
        "email           1        1         1",
        "  bo... (15 characters)  line 2",
        "ip              1        1         1",
        "  10... (8 characters)  line 2",
    ]
    assert "Every string of the file was looked at, also what no replay uses." in result.stdout


def test_after_redaction_nothing_is_found(trace: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared.jsonl"
    CliRunner().invoke(app, ["record", "import", str(trace), "--redact", "-o", str(shared)])
    result = run(shared, "--strict")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == f"{shared}: nothing was found in 2 requests by key, email, phone, card, ip"


def test_prices_and_dates_are_no_secrets() -> None:
    result = run(FIXTURE, "--strict")
    assert result.exit_code == 0
    assert "nothing was found in 16 requests" in result.stdout


def test_strict_is_an_exit_code(trace: Path) -> None:
    assert run(trace, "--strict").exit_code == 1


def test_the_same_as_data(trace: Path) -> None:
    assert orjson.loads(run(trace, "--format", "json").stdout) == {
        "secrets_version": 1,
        "trace": str(trace),
        "unit": "request",
        "records": 2,
        "lines_not_utf8": 0,
        "detectors": ["key", "email", "phone", "card", "ip"],
        "findings": [
            {
                "detector": "key",
                "values": 1,
                "places": 1,
                "records": 1,
                "examples": [{"place": "request 'line-1', segment 1", "masked": "sk... (108 characters)"}],
            }
        ],
    }


@pytest.mark.parametrize("page_format", ["terminal", "json"])
def test_no_value_is_printed(page_format: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    values = [KEY, "bob@example.com", "+14155552671", "8.8.8.8", "4111 1111 " + "1111 1111"]
    path.write_bytes(b"".join(orjson.dumps({"request": value, "segments": [value]}) + b"\n" for value in values))
    out = run(path, "--format", page_format).stdout
    assert out.count("characters)") >= 5
    assert not any(value in out for value in values)


def test_a_users_pattern_turns_it_on(trace: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(trace), "--secret-pattern", r"word=Noth\w+"])
    assert "word            1        1         1" in result.stdout


def test_files_of_any_text_and_standard_input_are_looked_at(tmp_path: Path) -> None:
    given = b'[\n {"to": "bob@example.com"},\n {"to": "\xff eve@example.com"}\n]\n'
    result = run("-", given=given)
    assert result.stdout.splitlines()[0] == "standard input: do not share this file as it is (4 lines)"
    assert "email           2        2         2" in result.stdout
    assert "next:" not in result.stdout


@pytest.mark.parametrize("option", [["--most", "3"], ["-o", "folder"], ["--model", "m"], ["--trace-format", "har"]])
def test_options_of_the_other_page_are_refused(option: list[str], trace: Path, tmp_path: Path) -> None:
    error = run(trace, *option).exception
    assert isinstance(error, KvauditError)
    assert "--secrets looks for secrets only" in error.message
    assert not (tmp_path / "folder").exists()


def test_parquet_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and so on")
    error = run(tmp_path / "rows.parquet").exception
    assert isinstance(error, KvauditError)
    assert "--redact" in (error.hint or "")


def archive(name: str) -> bytes:
    content = f"the key is {KEY}\n".encode()
    packed = io.BytesIO()
    if name == "zip":
        with zipfile.ZipFile(packed, "w") as zipped:
            zipped.writestr("log.txt", content)
    if name == "tar":
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("log.txt"), io.BytesIO(content))
    return packed.getvalue()


UNREADABLE = {
    "UTF-16": f"the key is {KEY}\n".encode("utf-16"),
    "UTF-16 without a mark": f"the key is {KEY}\n".encode("utf-16-le"),
    "UTF-32": f"the key is {KEY}\n".encode("utf-32"),
    "bzip2": bz2.compress(KEY.encode()),
    "xz": lzma.compress(KEY.encode()),
    "gzip in gzip": gzip.compress(gzip.compress(KEY.encode())),
    "bzip2 in gzip": gzip.compress(bz2.compress(KEY.encode())),
    "zip": archive("zip"),
    "tar": archive("tar"),
    "EBCDIC": f"the key is {KEY}\n".encode("cp500"),
    "NULs": b"line\n" + KEY[:9].encode() + b"\0" + KEY[9:].encode() + b"\n",
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_never_called_clean(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(UNREADABLE[kind])
    result = run(path, "--strict")
    error = result.exception
    assert isinstance(error, KvauditError)
    assert error.exit_code == 2
    assert str(path) in error.message
    assert any(word in (error.hint or "") for word in ("unpack", "convert"))
    assert "nothing was found" not in result.stdout


def test_lines_that_are_not_utf8_are_said(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nth\xe9e\nfour\n")
    result = run(path, "--strict")
    assert result.exit_code == 1
    assert "nothing was found" not in result.stdout
    assert "1 line not in UTF-8, of which only what is ASCII was looked at" in result.stdout
    assert orjson.loads(run(path, "--format", "json").stdout)["lines_not_utf8"] == 1


def test_a_secret_in_the_header_is_replaced_and_then_nothing_is_found(tmp_path: Path) -> None:
    password, pan = "hunT3r" + "2xY9", int("41111111" + "11111111")
    path, shared = tmp_path / "trace.jsonl", tmp_path / "shared.jsonl"
    header = {"kvaudit_trace": 1, "settings": {"password": password, "api_key": "k3y" + "x8Yz" * 6}, "pan": pan}
    request = {"request": "r", "segments": [{"kind": "query", "text": "Hello"}]}
    path.write_bytes(orjson.dumps(header) + b"\n" + orjson.dumps(request) + b"\n")
    assert {
        one["detector"]: one["values"] for one in orjson.loads(run(path, "--format", "json").stdout)["findings"]
    } == {
        "key": 2,
        "card": 1,
    }
    assert CliRunner().invoke(app, ["record", "import", str(path), "--redact", "-o", str(shared)]).exit_code == 0
    assert not any(value in shared.read_text() for value in (password, "k3yx8Yz", str(pan)))
    assert run(shared, "--strict").exit_code == 0


def test_neither_a_tokenizer_nor_a_model_is_loaded(trace: Path) -> None:
    program = (
        "import sys\nfrom kvaudit.cli import app\n"
        f"app(['inspect', {str(trace)!r}, '--secrets'], standalone_mode=False)\nprint(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = {name.partition(".")[0] for name in out.splitlines()[-1].split()}
    assert "kingfisher_sdk" in loaded
    assert not loaded & {"torch", "transformers", "tokenizers", "pyarrow", "rich", "scipy"}


def test_a_cut_off_file_is_an_error_with_its_name(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-20])
    error = run(trace).exception
    assert isinstance(error, KvauditError)
    assert str(trace) in error.message
