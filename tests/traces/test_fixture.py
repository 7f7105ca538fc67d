"""The fixture is what its README says: real rows, and the trace that the documented command makes of them."""

from __future__ import annotations

import csv
import re
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvaudit.cli import app
from kvaudit.models.files import resolve_model
from kvaudit.traces import read_trace

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCE_VERSION = "2026.1"


def documented_command() -> list[str]:
    (command,) = re.findall(r"```sh\n(.*?)```", (FIXTURES / "README.md").read_text("utf-8"), re.DOTALL)
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "kvaudit"
    return arguments


def test_the_documented_command_makes_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = documented_command()
    assert arguments[-2:] == ["-o", "fixtures/rolling.jsonl.gz"]
    monkeypatch.chdir(FIXTURES.parent)

    result = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "again.jsonl.gz")], catch_exceptions=False)

    assert result.exit_code == 0
    assert read_trace(tmp_path / "again.jsonl.gz").digest == read_trace(FIXTURES / "rolling.jsonl.gz").digest


def test_the_trace_is_a_rolling_window_of_8_documents() -> None:
    trace = read_trace(FIXTURES / "rolling.jsonl.gz")

    assert len(trace.requests) == 16
    windows = [
        [segment.text for segment in prompt if segment.kind == "document"]
        for request in trace.requests
        for prompt in (*request.prelude, request.segments)
    ]
    assert all(len(set(window)) == 8 for window in windows)
    for before, now in zip(windows[::2], windows[1::2], strict=True):
        assert now[:7] == before[1:]


def test_the_answer_stands_in_one_document_and_not_in_the_question() -> None:
    for request in read_trace(FIXTURES / "rolling.jsonl.gz").requests:
        *before, query = request.segments
        begun = query.text.rsplit("\n", 1)[-1]
        assert request.expected
        assert request.expected not in query.text
        assert [segment.text for segment in before if begun in segment.text] == [f"{begun}{request.expected}\n"]
        assert sum(request.expected in segment.text for segment in before) == 1


def test_the_events_are_rows_of_bokeh_sampledata() -> None:
    try:
        installed = version("bokeh-sampledata")
    except PackageNotFoundError:
        pytest.skip("needs bokeh-sampledata")
    if installed != SOURCE_VERSION:
        pytest.skip(f"bokeh-sampledata {installed} has other figures than {SOURCE_VERSION}")
    from bokeh_sampledata import stocks

    columns = ("date", "open", "high", "low", "close", "volume")
    there = {
        (symbol, *map(str, row))
        for symbol in ("AAPL", "FB", "GOOG", "IBM", "MSFT")
        for row in zip(*(getattr(stocks, symbol)[column] for column in columns), strict=True)
    }
    with (FIXTURES / "events.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))

    assert len(rows) == 205
    assert [row for row in rows if (row["symbol"], *(row[column] for column in columns)) not in there] == []


@pytest.mark.model
def test_full_prefill_gives_every_answer_with_a_clear_margin() -> None:
    """In transformers' own forward pass. Greedy decoding gives the answer if each of its tokens is the likeliest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = resolve_model("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(files.folder, gguf_file=files.gguf_file)
    model = AutoModelForCausalLM.from_pretrained(files.folder, gguf_file=files.gguf_file, dtype=torch.float32).eval()

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    margins = []
    for request in read_trace(FIXTURES / "rolling.jsonl.gz").requests:
        prompt = [token for segment in request.segments for token in encode(segment.text)]
        answer = encode(f"{request.expected}\n")
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
        best, second = logits.topk(2).values.unbind(-1)
        assert logits.argmax(-1).tolist() == answer, request.request_id
        margins.append(float((best - second).min()))
    assert min(margins) > 0.5
