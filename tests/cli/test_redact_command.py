"""`--redact` of the commands that write traces, as a user calls them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import orjson
import pytest
from inspected_models import ByteModel
from redaction.sensitive_values import KEYS
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.cli.redacting import NOT_LOOKED_FOR
from kvaudit.errors import KvauditError
from kvaudit.models.reading import ReadingModel
from kvaudit.traces import read_trace

KEY = KEYS["Anthropic key"]
SYSTEM = {"role": "system", "content": f"Answer bob@example.com. The key is {KEY}."}
LINES = [
    {"id": "a of bob@example.com", "messages": [SYSTEM, {"role": "user", "content": "From 8.8.8.8"}], "max_tokens": 5},
    {"id": "b", "session": "eve@example.com", "messages": [SYSTEM, {"role": "user", "content": "Hello"}]},
    {"id": "c", "messages": [{"role": "user", "content": "Nothing, T-12"}]},
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in LINES))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def run(*arguments: object, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["record", *map(str, arguments)], env=environment)


def refusal(*arguments: object, environment: dict[str, str] | None = None) -> KvauditError:
    error = run(*arguments, environment=environment).exception
    assert isinstance(error, KvauditError)
    assert error.exit_code == 2
    return error


def texts(path: Path) -> list[list[str]]:
    return [[segment.text for segment in request.segments] for request in read_trace(path).requests]


def header(path: Path) -> dict[str, Any]:
    return dict(read_trace(path).header)


def test_secrets_are_replaced_and_counted(log: Path, trace: Path) -> None:
    result = run("import", log, "--redact", "-o", trace)

    assert result.exit_code == 0
    said = result.stderr.splitlines()
    at = said.index("redacted   values   places  requests")
    assert said[at + 1 : at + 6] == [
        "key             1        1         2",
        "email           2        3         2",
        "ip              1        1         1",
        f"redaction found no phone, card ({NOT_LOOKED_FOR})",
        "2 texts changed, in 2 of 3 requests; their token counts may differ from now on (--model NAME counts them)",
    ]
    assert said[-1] == f"next: kvaudit replay {shlex.quote(str(trace))} --orders 5"
    written = trace.read_text()
    assert not any(value in written for value in (KEY, "bob@", "eve@", "8.8.8.8"))
    first, second, third = texts(trace)
    assert re.fullmatch(r"Answer \[EMAIL-\w{8}\]. The key is \[KEY-\w{8}\].", first[0])
    assert first[0] == second[0]
    assert third == ["Nothing, T-12"]
    assert header(trace)["redacted"] == [
        {
            "detectors": ["key", "email", "phone", "card", "ip"],
            "values": 4,
            "places": 5,
            "requests": 2,
            "segments": 2,
        }
    ]


def test_without_the_option_nothing_is_replaced(log: Path, trace: Path) -> None:
    assert run("import", log, "-o", trace).exit_code == 0
    assert KEY in trace.read_text()
    assert "redacted" not in header(trace)


def test_a_redacted_trace_can_be_redacted_again_and_stays_as_it_is(log: Path, trace: Path, tmp_path: Path) -> None:
    run("import", log, "--redact", "-o", trace)
    again = run("import", trace, "--redact", "-o", tmp_path / "again.jsonl")
    assert "redaction found no key, email, phone, card, ip" in again.stderr
    assert texts(tmp_path / "again.jsonl") == texts(trace)
    assert [run_of["values"] for run_of in header(tmp_path / "again.jsonl")["redacted"]] == [4, 0]


def test_only_some_detectors_and_patterns_of_the_user(log: Path, trace: Path) -> None:
    run("import", log, "--redact-only", "email, ticket", "--redact-pattern", r"ticket=T-\d+", "-o", trace)
    written = trace.read_text()
    assert KEY in written
    assert "8.8.8.8" in written
    assert "bob@" not in written
    assert re.fullmatch(r"Nothing, \[TICKET-\w{8}\]", texts(trace)[2][0])


def test_a_pattern_alone_redacts_what_the_detectors_find_too(log: Path, trace: Path) -> None:
    run("import", log, "--redact-pattern", r"ticket=T-\d+", "-o", trace)
    assert KEY not in trace.read_text()
    assert "T-12" not in trace.read_text()


def test_placeholders_differ_from_command_to_command_unless_a_salt_is_set(log: Path, tmp_path: Path) -> None:
    def redacted(name: str, salt: str | None = None) -> bytes:
        path = tmp_path / name
        run("import", log, "--redact", "-o", path, environment={"KVAUDIT_REDACT_SALT": salt} if salt else None)
        return path.read_bytes()

    assert redacted("a") != redacted("b")
    assert (
        redacted("c", "0123456789abcdef") == redacted("d", "0123456789abcdef") != redacted("e", "another secret salt")
    )
    assert b"0123456789abcdef" not in redacted("c", "0123456789abcdef")


def test_with_a_model_the_tokens_that_changed_are_counted(
    log: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def open_bytes(model: str) -> ReadingModel:
        opened.append(model)
        return ReadingModel(model, ByteModel(), None)  # type: ignore[arg-type]

    monkeypatch.setattr("kvaudit.models.reading.open_tokenizer", open_bytes)
    result = run("import", log, "--redact", "--model", "bytes", "-o", trace)

    system, user = texts(trace)[0]
    before, after = len(SYSTEM["content"]) + len("From 8.8.8.8"), len(system) + len(user)
    said = result.stderr.splitlines()
    at = said.index(f"2 texts changed, in 2 of 3 requests: {before} tokens before, {after} after")
    request_id = read_trace(trace).requests[0].request_id
    assert said[at + 1 : at + 3] == [
        f"  request '{request_id}', segment 1 (in 2 requests): {len(SYSTEM['content'])} -> {len(system)} tokens",
        f"  request '{request_id}', segment 2: 12 -> 18 tokens",
    ]
    told = header(trace)["redacted"][0]
    assert (told["tokenizer"], told["tokens_before"], told["tokens_after"]) == ("bytes", before, after)
    assert set(opened) == {"bytes"}


def test_an_event_table_is_redacted_as_it_is_recorded(tmp_path: Path, trace: Path) -> None:
    rows = "".join(f"{day},user{day % 2}@example.com,{day * 7}\n" for day in range(12))
    (tmp_path / "visits.csv").write_text(f"day,user,count\n{rows}")
    result = run("rolling", tmp_path / "visits.csv", "--window", 3, "--redact", "-o", trace)
    assert result.exit_code == 0
    assert "@example.com" not in trace.read_text()
    assert re.search(r"^email +2 +\d+ +\d+$", result.stderr, re.MULTILINE)
    assert header(trace)["workload"] == "rolling"
    assert len({segment for request in texts(trace) for segment in request if "[EMAIL-" in segment}) >= 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--redact-only", "emails"], "unknown detector 'emails'"),
        (["--redact-only", " , "], "no detector is named"),
        (["--redact-pattern", "x"], "'x' is no pattern"),
        (["--redact-pattern", "key=x"], "there is a detector 'key' already"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options: list[str], message: str, trace: Path) -> None:
    assert message in refusal("import", "no such file", *options, "-o", trace).message


def test_a_salt_that_could_be_guessed_is_refused(log: Path, trace: Path) -> None:
    error = refusal("import", log, "--redact", "-o", trace, environment={"KVAUDIT_REDACT_SALT": "short"})
    assert error.message == "KVAUDIT_REDACT_SALT has 5 characters: placeholders could be guessed"


def test_token_ids_are_refused_and_nothing_is_written(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"request": "a", "segments": [{"kind": "query", "text": "x", "token_ids": [1, 2]}]}\n')
    assert "request 'a' carries token ids in segment 1" in refusal("import", path, "--redact", "-o", trace).message
    assert not trace.exists()


def test_what_is_printed_is_redacted_too(tmp_path: Path, trace: Path) -> None:
    role = KEYS["npm token"]
    good = {"messages": [{"role": "user", "content": "Hello"}]}
    bad = {"messages": [{"role": role, "content": "Hello"}]}
    path = tmp_path / "log of bob@example.com.jsonl"
    path.write_bytes(orjson.dumps(good) + b"\n" + orjson.dumps(bad) + b"\n")
    result = run("import", path, "--redact", "-o", trace)
    said = f"{result.stderr} {result.exception}"
    assert role not in said
    assert "bob@" not in said
    assert "has the role '[KEY-" in said
    without = run("import", path, "-o", tmp_path / "plain.jsonl")
    assert role in f"{without.stderr} {without.exception}"


def test_the_first_time_the_user_is_told_what_takes_seconds(
    log: Path, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_at: list[Path | None] = []

    def no_detectors(names: list[str], cache: Path | None) -> list[object]:
        kept_at.append(cache)
        return []

    monkeypatch.setattr("kvaudit.redaction.builtin.built_in", no_detectors)
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / "cache"))
    note = "the rules for keys are compiled, which takes some seconds, once"
    assert note in run("import", log, "--redact", "-o", trace).stderr
    assert note not in run("import", log, "--redact-only", "ip", "-o", trace).stderr
    (tmp_path / "cache" / "key-rules").mkdir(parents=True)
    assert note not in run("import", log, "--redact", "-o", trace).stderr
    assert kept_at == [tmp_path / "cache" / "key-rules"] * 3


CUT = "x" * 59 + " "
"""What a value begins with so that errors, which show 80 characters of it, would show a part of the key behind it."""


def shows_part_of_key(text: str) -> bool:
    return any(KEY[at : at + 8] in text for at in range(len(KEY) - 8))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"messages": [{"role": CUT + KEY, "content": "Hi"}]}, "has the role"),
        ({"messages": [{"role": "user", "content": [{"type": CUT + KEY}]}]}, "has a part of type"),
        ({"messages": [{"role": "user", "content": [{"type": {"a": {"b": CUT + KEY}}}]}]}, "has a part of type"),
        ({"messages": [{"role": "user", "content": [{"type": ["password", KEY, *"abcdef"]}]}]}, "has a part of type"),
        ({"request": CUT + KEY, "segments": 5}, "has a 'segments' that is not a list"),
        ({"request": "a", "segments": [{"kind": CUT + KEY, "text": "Hi"}]}, "has the kind"),
        ({"request": "a", "segments": [CUT + KEY]}, "refers to the segment"),
        ({CUT[-30:] + KEY: 1}, "the first line has the fields"),
    ],
)
def test_no_part_of_a_secret_is_shown_where_values_are_cut(
    tmp_path: Path, trace: Path, line: dict[str, object], told: str
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(orjson.dumps(line))

    error = refusal("import", log, "--redact", "-o", trace)

    assert told in error.message or told in str(error.hint)
    assert "[KEY-" in str(error)
    assert not shows_part_of_key(f"{error.message} {error.hint}")
    assert shows_part_of_key(refusal("import", log, "-o", trace).message)


def test_no_part_of_a_secret_is_shown_of_what_is_left_out(log: Path, trace: Path) -> None:
    bad = {"messages": [{"role": "user", "content": [{"type": CUT + KEY}]}]}
    log.write_bytes(log.read_bytes() + orjson.dumps(bad))

    result = run("import", log, "--redact", "-o", trace)

    assert "left out 1: " in result.stderr
    assert not shows_part_of_key(result.stderr)
    assert not shows_part_of_key(trace.read_text())
