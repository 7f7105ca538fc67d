"""`kvaudit inspect`, as a user calls it."""

from __future__ import annotations

import shlex
from pathlib import Path
from random import Random

import orjson
import pyarrow.parquet as pq
import pytest
from inspected_models import ByteModel
from test_cli_start import parsed
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.errors import EngineError, KvauditError, UsageError
from kvaudit.models import reading
from kvaudit.traces.segments import make_segment

FIXTURE = Path(__file__).parents[2] / "fixtures" / "rolling.jsonl.gz"


@pytest.fixture
def gone() -> set[str]:
    return {"org/gone"}


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch, gone: set[str]) -> list[str]:
    """Which models were opened; `gone` ones cannot be had, `typo` does not exist, all others count bytes."""
    names: list[str] = []

    def open_tokenizer(model: str) -> reading.ReadingModel:
        names.append(model)
        if model in gone:
            raise EngineError("the Hugging Face Hub cannot be reached")
        if model == "typo":
            raise UsageError("unknown model 'typo'")
        return reading.ReadingModel(model, ByteModel(), 100)  # type: ignore[arg-type]

    monkeypatch.setattr(reading, "open_tokenizer", open_tokenizer)
    return names


def trace_of(path: Path, *prompts: tuple[str, ...], **fields: object) -> Path:
    lines = [
        {"request": f"r{n}", "segments": [{"kind": kind, "text": text} for kind, text in prompt], **fields}
        for n, prompt in enumerate([[part.split(":", 1) for part in prompt] for prompt in prompts])
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    prompts = [("instruction:rules", f"document:row {n}", f"document:row {n + 1}", "query:why") for n in range(3)]
    return trace_of(tmp_path / "trace.jsonl", *prompts)


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def refusal(*arguments: object) -> KvauditError:
    error = inspect(*arguments).exception
    assert isinstance(error, KvauditError)
    assert error.exit_code == 2
    return error


def test_a_trace_is_enough(trace: Path, opened: list[str]) -> None:
    result = inspect(trace)

    assert result.exit_code == 0
    assert opened == ["smollm2-135m"]
    assert result.stdout.startswith("3 requests, 54 prompt tokens\n")
    assert "no --model was named: smollm2-135m is the default" in " ".join(result.stdout.split())


def test_the_named_model_counts(trace: Path, opened: list[str]) -> None:
    shown = " ".join(inspect(trace, "--model", "org/named").stdout.split())

    assert opened == ["org/named"]
    assert "tokens of the tokenizer of org/named" in shown
    assert "--model" not in shown


def test_a_named_model_that_cannot_be_had_is_not_replaced(trace: Path, opened: list[str]) -> None:
    error = inspect(trace, "--model", "org/gone").exception
    assert isinstance(error, EngineError)
    assert opened == ["org/gone"]


def test_without_any_tokenizer_no_token_counts_are_made_up(trace: Path, gone: set[str]) -> None:
    gone.add("smollm2-135m")
    result = inspect(trace, "--format", "json")
    data = orjson.loads(result.stdout)

    assert result.exit_code == 0
    assert (data["counts"]["requests"], data["counts"]["left_out"], data["counts"]["prompt_tokens"]) == (3, 3, 0)
    assert data["notes"][-1] == "tokens of texts are not counted"
    assert "left out: 3 requests with texts" in inspect(trace).stdout


def test_an_unknown_model_is_wrong_usage(trace: Path) -> None:
    assert "unknown model 'typo'" in refusal(trace, "--model", "typo").message


def test_carried_token_ids_need_no_tokenizer(tmp_path: Path, opened: list[str]) -> None:
    lines = []
    for name in ("r0", "r1"):
        document, query = make_segment("document", "", token_ids=(1, 2, 3)), make_segment("query", "", token_ids=(4,))
        parts = [{"kind": part.kind, "token_ids": part.token_ids} for part in (document, query)]
        lines.append(orjson.dumps({"request": name, "segments": parts}))
    path = tmp_path / "ids.jsonl"
    path.write_bytes(b"\n".join(lines))

    data = orjson.loads(inspect(path, "--format", "json").stdout)

    assert opened == []
    assert data["tokenizer"] is None
    assert (data["counts"]["prompt_tokens"], data["reuse"]["sglang_reused"]) == (8, 3)
    inspect(path, "--model", "org/named")
    assert opened == ["org/named"]


def test_json_is_the_whole_of_stdout(trace: Path) -> None:
    data = orjson.loads(inspect(trace, "--format", "json").stdout)

    assert (data["trace"], data["counts"]["requests"]) == (str(trace), 3)
    assert data["reuse"]["capacity_tokens"] == 500_000


def test_a_folder_gets_table_and_data(trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "deep"
    assert inspect(trace, "-o", folder).exit_code == 0

    table = pq.read_table(folder / "reuse.parquet")
    data = orjson.loads((folder / "inspect.json").read_bytes())
    assert table["request_id"].to_pylist() == ["r0", "r1", "r2"]
    assert sum(table["prompt_tokens"].to_pylist()) == data["counts"]["prompt_tokens"]
    assert sum(table["chunk_reused_any"].to_pylist()) == data["reuse"]["chunk_reused_any"]
    assert table.schema.metadata[b"cache_tokens"] == b"500000"


def test_the_table_alone(trace: Path, tmp_path: Path) -> None:
    inspect(trace, "--table", tmp_path / "one.parquet", "--cache-tokens", "unlimited")

    assert pq.read_table(tmp_path / "one.parquet").schema.metadata[b"cache_tokens"] == b"unlimited"
    assert {path.name for path in tmp_path.iterdir()} == {"one.parquet", "trace.jsonl"}


def test_a_smaller_cache_and_other_blocks_reuse_otherwise(trace: Path) -> None:
    def reused(*options: object) -> tuple[int, int]:
        data = orjson.loads(inspect(trace, "-f", "json", *options).stdout)["reuse"]
        return data["vllm_reused"], data["sglang_reused"]

    assert reused() == (0, 2 * len("rulesrow "))
    assert reused("--block-size", 4, "--page-size", 4) == (16, 16)
    assert reused("--cache-tokens", 32) == (0, 2 * len("rulesrow "))
    assert reused("--cache-tokens", "1_000", "--block-size", 1) == (18, 18)


@pytest.mark.parametrize(
    ("options", "named"),
    [((), []), (("--model", "org/a b", "--trace-format", "kvaudit"), ["--format", "kvaudit", "--model", "org/a b"])],
)
def test_a_log_whose_texts_recur_inside_messages_gets_the_command_that_cuts_it(
    tmp_path: Path, options: tuple[str, ...], named: list[str]
) -> None:
    path = tmp_path / f"a long name that a page of eighty columns would wrap {'x' * 80} it's.jsonl"
    texts = ["".join(Random(seed).choices("bcdefgh ", k=60)) for seed in range(2)]
    trace_of(path, *((f"query:{a} and {b}, {n}?",) for n, (a, b) in enumerate((texts, texts[::-1]))))

    shown = inspect(path, *options).stdout
    (line,) = {line for line in shown.splitlines() if line.startswith("    kvaudit ")}
    command = ["kvaudit", "record", "import", str(path), *named, "--segment", "auto", "-o", "segmented.jsonl.zst"]
    assert "warning [recurs-inside]" in shown
    assert shlex.split(line) == command
    assert parsed(command) == ("record", "import")
    data = orjson.loads(inspect(path, *options, "-f", "json").stdout)
    commands = {finding["code"]: finding["command"] for finding in data["findings"]}
    assert shlex.split(commands.pop("recurs-inside")) == shlex.split(commands.pop("nothing-reused")) == command
    assert set(commands.values()) <= {None}


def test_strict_fails_on_errors_only(tmp_path: Path, trace: Path) -> None:
    new = trace_of(tmp_path / "new.jsonl", ("document:a",), ("document:b",))
    warned = trace_of(tmp_path / "warned.jsonl", *((f"document:a{' ' * n} b", "document:same") for n in range(2)))

    assert inspect(trace, "--strict").exit_code == 0
    assert "warning [form]" in inspect(warned, "--strict").stdout
    assert inspect(warned, "--strict").exit_code == 0
    assert inspect(new).exit_code == 0
    assert inspect(new, "--strict").exit_code == 1
    assert "error [nothing-reused]" in inspect(new, "--strict").stdout


def test_a_prompt_beyond_the_context_is_an_error(tmp_path: Path) -> None:
    long = trace_of(tmp_path / "long.jsonl", ("document:a" * 101,), ("document:a" * 101,))

    assert "error [beyond-context]" in inspect(long).stdout


def test_chats_are_read_and_rendered(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes"},
        {"role": "user", "content": "?"},
    ]
    path.write_bytes(b"\n".join(orjson.dumps({"messages": turns[:count]}) for count in (1, 3)))

    shown = " ".join(inspect(path).stdout.split())
    assert "2 chats" in shown
    assert "[template-drift]" not in shown


def test_most_cuts_the_list(tmp_path: Path) -> None:
    faults = trace_of(
        tmp_path / "faults.jsonl",
        *((f"document:{'word ' * 9}{n}  x", "document:same" + " " * n, "query:?") for n in range(3)),
    )
    all_of_them = orjson.loads(inspect(faults, "-f", "json").stdout)["findings"]
    one = orjson.loads(inspect(faults, "-f", "json", "--most", 1).stdout)["findings"]

    assert one == all_of_them[:1] != all_of_them


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "xml"), "unknown format 'xml'"),
        (("--cache-tokens", "much"), "--cache-tokens 'much' is not a number of tokens"),
        (("--cache-tokens", "-5"), "is not a number of tokens"),
        (("--cache-tokens", "9" * 5000), "is not a number of tokens"),
        (("--cache-tokens", "16"), "a cache of 16 tokens holds no block"),
        (("--trace-format", "nope"), "unknown trace format 'nope'"),
    ],
)
def test_wrong_usage_is_one_error(trace: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(trace, *arguments).message


def test_a_broken_trace_is_one_error_with_its_line_and_leaves_nothing(trace: Path, tmp_path: Path) -> None:
    trace.write_bytes(trace.read_bytes() + b"{broken\n")

    assert f"{trace}, line 4: broken JSON" in refusal(trace, "-o", tmp_path / "out").message
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"kvaudit_trace": 1}\n'])
def test_a_trace_without_requests_is_one_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)

    assert refusal(path).message.startswith(str(path))


def test_a_file_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "nope.jsonl").message


def test_an_output_that_cannot_be_a_folder_is_one_error(trace: Path) -> None:
    assert "cannot be made" in refusal(trace, "-o", trace / "out").message


def test_the_fixture_inspects(tmp_path: Path) -> None:
    data = orjson.loads(inspect(FIXTURE, "-f", "json").stdout)

    assert data["counts"]["requests"] == 16
    assert 0 < data["reuse"]["vllm_reused"] <= data["reuse"]["sglang_reused"] < data["reuse"]["chunk_reused_any"]
