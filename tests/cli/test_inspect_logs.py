"""`kvaudit inspect` on what others wrote: logs with more than requests in them, and traces without prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from inspected_models import ByteModel
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.errors import KvauditError
from kvaudit.models import reading
from kvaudit.preflight.table import SCHEMA
from kvaudit.traces.hash_only import WEKA


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def open_tokenizer(model: str) -> reading.ReadingModel:
        names.append(model)
        return reading.ReadingModel(model, ByteModel(), 100)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "open_tokenizer", open_tokenizer)
    return names


def inspect(*arguments: object, given: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], input=given)


def data(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(inspect(*arguments, "-f", "json").stdout)
    return found


def words(*arguments: object) -> str:
    return " ".join(inspect(*arguments).stdout.split())


def lines(path: Path, *records: object) -> Path:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    def entry(name: str, url: str, body: object) -> dict[str, object]:
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return lines(
        tmp_path / "batch.jsonl",
        entry("a", "/v1/chat/completions", chat),
        entry("b", "/v1/embeddings", {"model": "m", "input": "Hi"}),
        entry("c", "/v1/chat/completions", chat),
        entry("a", "/v1/chat/completions", chat),
    )


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    rows = [(1100, [0, 1, 2]), (1600, [0, 1, 3, 4]), (700, None)]
    return lines(
        tmp_path / "mooncake.jsonl",
        *(
            {"timestamp": n, "input_length": size, "output_length": 9, "hash_ids": ids}
            for n, (size, ids) in enumerate(rows)
        ),
    )


@pytest.mark.usefixtures("opened")
def test_what_a_log_holds_beside_requests_is_named_with_its_lines(batch: Path) -> None:
    shown, found = words(batch), data(batch)

    assert {place for row in found["left_out_of_log"] for place in row["places"]} >= {"line 2"}
    assert sum(row["count"] for row in found["left_out_of_log"]) == 2
    for row in found["left_out_of_log"]:
        told = f"left out {row['count']} {row['reason']}: {', '.join(row['places'])}"
        assert told in shown
        assert told in found["notes"]


@pytest.mark.usefixtures("opened")
def test_kvaudits_own_traces_have_nothing_left_out(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "own.jsonl",
        {"kvaudit_trace": 1, "left_out": [{"reason": "was bad", "count": 1, "places": ["line 9"]}]},
        {"request": "a", "segments": [{"kind": "query", "text": "x"}]},
    )

    assert data(path)["left_out_of_log"] == []
    assert "was bad" not in words(path)


def test_a_trace_without_prompts_needs_no_tokenizer_and_says_what_it_cannot_show(
    mooncake: Path, opened: list[str]
) -> None:
    shown = words(mooncake)

    assert opened == []
    assert shown.startswith("2 requests, 2,700 prompt tokens")
    assert "a Mooncake trace of lengths and hashes" in shown
    assert "exact prefix, vLLM (blocks of 512) 1,024 37.9 %" in shown
    assert "exact prefix, SGLang (pages of 512) 1,024 37.9 %" in shown
    assert "no answer can be audited" in shown
    assert "cannot be seen" in shown
    assert "left out 1 has no 'hash_ids': line 3" in shown
    assert "at a block requests computed tokens after it" in shown
    for absent in ("chunks at any position", "Findings", "What paying", "stop at miss"):
        assert absent not in shown


def test_its_data_and_its_table_have_the_same_schema_with_nulls(mooncake: Path, tmp_path: Path) -> None:
    assert inspect(mooncake, "-o", tmp_path / "out").exit_code == 0
    found = orjson.loads((tmp_path / "out" / "inspect.json").read_bytes())
    table = pq.read_table(tmp_path / "out" / "reuse.parquet")

    assert table.schema.equals(SCHEMA)
    assert table["vllm_reused"].to_pylist() == [0, 1024]
    assert table["chunk_reused_any"].to_pylist() == table["segments"].to_pylist() == [None, None]
    assert table["break_kind"].to_pylist() == ["block", "block"]
    assert table.schema.metadata[b"block_tokens"] == b"512"
    assert found["hashed"]["format"] == "Mooncake"
    assert found["hashed"]["distinct_blocks"] == 3
    assert found["reuse"]["vllm_reused"] == 1024
    assert found["left_out_of_log"] == [{"reason": "has no 'hash_ids'", "count": 1, "places": ["line 3"]}]


def test_standard_input_holds_it_too(mooncake: Path) -> None:
    result = inspect("-", given=mooncake.read_bytes())

    assert "standard input, a Mooncake trace" in " ".join(result.stdout.split())


def test_the_size_of_a_block_is_the_traces_own_or_given_where_it_has_none(mooncake: Path, tmp_path: Path) -> None:
    weka = tmp_path / "weka.json"
    weka.write_text(WEKA)

    assert data(mooncake, "--block-size", 256)["reuse"]["vllm_block_tokens"] == 256
    assert "(--block-size N where an id stands" in words(mooncake, "--block-size", 256)
    assert (
        data(weka, "--block-size", 64)["reuse"]["vllm_block_tokens"] == data(weka)["reuse"]["vllm_block_tokens"] == 64
    )
    refusal = inspect(weka, "--block-size", 16).exception
    assert isinstance(refusal, KvauditError)
    assert "blocks of 64 tokens" in str(refusal)


def test_options_that_need_prompts_are_said_to_be_unused(mooncake: Path) -> None:
    shown = words(mooncake, "--model", "x", "--page-size", 4)

    assert "--model is not used" in shown
    assert "--page-size is not used" in shown
    assert "is not used" not in words(mooncake)


def test_capacity_counts_tokens(mooncake: Path) -> None:
    assert data(mooncake, "--cache-tokens", 1536)["reuse"]["too_large_for_the_cache"] == 2
    assert data(mooncake, "--cache-tokens", "unlimited")["reuse"]["vllm_reused"] == 1024


@pytest.mark.parametrize("command", [("replay",), ("record", "import", "-o", "out.jsonl")])
def test_replay_and_import_refuse_it_with_the_reason(
    mooncake: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, [*command, str(mooncake)]).exception

    assert isinstance(error, KvauditError)
    assert "without the prompts, so that no answer can be audited" in error.message
    assert "kvaudit inspect" in str(error.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["mooncake.jsonl"]
