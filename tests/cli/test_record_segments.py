"""`kvaudit record import --segment`: from a log to documents that are reused wherever they stand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tiny_chat_folder import tiny_chat_folder
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.errors import KvauditError, UsageError
from kvaudit.models import reading
from kvaudit.records import Request, messages_of
from kvaudit.segmenting.strategies import KNOWN
from kvaudit.store import open_run
from kvaudit.traces import read_trace

DRAWN = random.Random(7)
WORDS = ["river", "stone", "market", "letter", "engine", "window", "garden", "signal", "bridge", "copper", "harvest"]
DOCUMENTS = [" ".join(DRAWN.choices(WORDS, k=14)).capitalize() + "." for _ in range(4)]
ORDERS = [(0, 1, 2), (2, 3, 0), (1, 0, 3), (3, 2, 1)]


def kvaudit(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def done(*arguments: object) -> Result:
    result = kvaudit(*arguments)
    assert result.exit_code == 0, result.output or result.exception
    return result


def refusal(*arguments: object) -> KvauditError:
    error = kvaudit(*arguments).exception
    assert isinstance(error, KvauditError)
    assert error.exit_code == 2
    return error


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenizers are kept there and not in the user's own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("KVAUDIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_folder(tmp_path_factory.mktemp("models") / "tiny-chat")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A RAG service: three documents in another order in each request, inside one user message."""
    lines = []
    for number, order in enumerate(ORDERS):
        found = "\n".join(f"<document>{DOCUMENTS[at]}</document>" for at in order)
        content = f"Documents for question {number}:\n{found}\nWhat is number {number * 7919}?"
        messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": content}]
        lines.append({"id": f"r{number}", "messages": messages, "max_tokens": 2})
    path = tmp_path / "rag.jsonl"
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def requests(trace: Path) -> tuple[Request, ...]:
    return read_trace(trace).requests


def reused_tokens(trace: Path, model: Path) -> int:
    """What a cache that finds chunks at any position would reuse beyond the system message."""
    reuse = orjson.loads(done("inspect", trace, "--model", model, "--format", "json").stdout)["reuse"]
    return int(reuse["chunk_reused_any"]) - len("Answer.") * (len(ORDERS) - 1)


@pytest.mark.parametrize("strategy", ["auto", "pattern:<document>.*?</document>"])
def test_documents_in_any_order_are_reused(strategy: str, log: Path, trace: Path, model: Path, tmp_path: Path) -> None:
    done("record", "import", log, "-o", tmp_path / "whole.jsonl")
    named = ("--model", model) if strategy == "auto" else ()
    done("record", "import", log, "--segment", strategy, *named, "-o", trace)

    assert reused_tokens(tmp_path / "whole.jsonl", model) == 0
    assert reused_tokens(trace, model) > 8 * min(map(len, DOCUMENTS)) * 0.8
    assert [messages_of(one.segments) for one in requests(trace)] == [
        messages_of(one.segments) for one in requests(tmp_path / "whole.jsonl")
    ]
    for request, order in zip(requests(trace), ORDERS, strict=True):
        documents = [part.text for part in request.segments if part.kind == "document"]
        assert [[DOCUMENTS[at] in text for text in documents].index(True) for at in order] == [0, 1, 2]

    settings = ("--model", model, "--orders", 2, "--policy", "token-topk", "--device", "cpu", "--like", "ideal")
    done("replay", trace, *settings, "-o", tmp_path / "run")
    rows = open_run(tmp_path / "run").table("observations").to_pylist()
    (last,) = [row for row in rows if (row["arm_id"], row["request_id"]) == ("token-topk.chronological", "r3")]
    assert last["reused_tokens"] > sum(len(DOCUMENTS[at]) for at in ORDERS[3]) * 0.8


def test_the_header_and_the_last_lines_say_what_was_done(log: Path, trace: Path, model: Path) -> None:
    result = done(
        "record", "import", log, "--segment", r"separator:\n", "--segment", "auto", "--model", model, "-o", trace
    )

    header: dict[str, Any] = dict(read_trace(trace).header)
    assert header["segments"] == [r"separator:\n", "auto"]
    cut, auto = header["segmenting"]
    assert cut == {"strategy": r"separator:\n", "requests_changed": 4, "segments": [8, 40]}
    assert auto["tokenizer"] == str(model)
    assert auto["tokenizer_digest"] == reading.open_tokenizer(str(model)).tokenizer.digest
    assert auto["recurring_texts"] == 0
    lines = result.stderr.splitlines()
    assert r"separator:\n: 4 of 4 requests are cut otherwise than before, 8 segments became 40" in lines
    assert lines[-3].startswith("auto: no 32 tokens in a row recur inside different messages")
    assert lines[-2].startswith(f"wrote {trace}: 4 requests")


def test_a_trace_can_be_cut_again_and_remembers_both(log: Path, trace: Path, tmp_path: Path) -> None:
    done("record", "import", log, "--segment", r"separator:\n", "-o", trace)
    done("record", "import", trace, "--segment", "message", "-o", tmp_path / "again.jsonl")
    done("record", "import", log, "-o", tmp_path / "whole.jsonl")
    done("record", "import", trace, "-o", tmp_path / "copy.jsonl")

    again, whole = read_trace(tmp_path / "again.jsonl"), read_trace(tmp_path / "whole.jsonl")
    assert again.digest == whole.digest != read_trace(trace).digest
    assert again.header["segments"] == [r"separator:\n", "message"]
    assert "segments" not in whole.header
    assert read_trace(tmp_path / "copy.jsonl").digest == read_trace(trace).digest


def test_parts_of_a_log_are_kept_where_a_strategy_asks_for_them(tmp_path: Path, trace: Path) -> None:
    parts = [{"type": "text", "text": text} for text in ("Read: ", "one", "\n", "two")]
    found = [{"type": "text", "text": text} for text in ("first", "second")]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Look.", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": found},
    ]
    log = tmp_path / "log.jsonl"
    log.write_bytes(orjson.dumps({"messages": messages}))

    texts = {}
    for strategy in ("message", "part", "tool-result"):
        done("record", "import", log, "--segment", strategy, "-o", trace)
        (request,) = requests(trace)
        texts[strategy] = [(part.kind, part.role, part.text) for part in request.segments]

    call = '{"name":"f","arguments":{}}'
    assert texts["message"] == [
        ("query", "user", "Read: one\ntwo"),
        ("message", "assistant", f"Look.\n{call}"),
        ("tool-result", "tool", "firstsecond"),
    ]
    assert texts["part"] == [
        ("document", "user", "Read: "),
        ("document", None, "one"),
        ("separator", None, "\n"),
        ("query", None, "two"),
        ("message", "assistant", "Look."),
        ("separator", None, "\n"),
        ("message", None, call),
        ("tool-result", "tool", "first"),
        ("tool-result", None, "second"),
    ]
    assert texts["tool-result"] == [*texts["message"][:2], *texts["part"][-2:]]


def test_wrong_usage_is_said_before_a_file_is_read(trace: Path) -> None:
    assert "unknown strategy 'words'" in refusal("record", "import", "none", "--segment", "words", "-o", trace).message
    error = refusal("record", "import", "none", "--model", "m", "-o", trace)
    assert error.message == "--model m is not used"
    error = refusal("record", "import", "none", "--segment", "json", "--model", "m", "-o", trace)
    assert error.message == "--model m is not used"


def test_a_pattern_that_fails_writes_nothing(log: Path, trace: Path) -> None:
    trace.write_text("as it was")

    error = refusal("record", "import", log, "--segment", "pattern:x*", "-o", trace)

    assert error.message == "request 'r0': the pattern 'x*' matches the empty text"
    assert trace.read_text() == "as it was"


def test_a_model_that_cannot_be_had_writes_nothing(log: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise UsageError(f"unknown model {name!r}")

    monkeypatch.setattr(reading, "open_tokenizer", unknown)

    error = refusal("record", "import", log, "--segment", "tokens:8", "--model", "typo", "-o", trace)
    assert error.message == "unknown model 'typo'"
    assert not trace.exists()


def test_ids_are_cut_without_opening_a_model(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "open_tokenizer", lambda name: pytest.fail("a tokenizer was opened"))
    log = tmp_path / "ids.jsonl"
    prompts = [{"kind": "query", "token_ids": [number, *range(10, 60)]} for number in range(2)]
    lines = [{"request": f"r{number}", "segments": [prompt]} for number, prompt in enumerate(prompts)]
    log.write_bytes(b"\n".join(map(orjson.dumps, lines)))

    done("record", "import", log, "--segment", "auto", "-o", trace)

    assert [len(part.token_ids or ()) for part in requests(trace)[0].segments] == [1, 50]
    assert "tokenizer" not in read_trace(trace).header["segmenting"][0]  # type: ignore[index]


def test_every_strategy_is_in_the_help() -> None:
    shown = done("record", "import", "--help").stdout

    assert all(f"  {known.written}:" in shown and known.summary in shown for known in KNOWN)
