"""`kvaudit record`, as a user calls it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click import unstyle
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.cli.record import app as record_app
from kvaudit.errors import KvauditError
from kvaudit.traces import read_trace

PRICES = "date,symbol,close\n" + "".join(f"2013-01-{day:02},{s},{day}.5\n" for day in range(1, 11) for s in "AB")
CHATS = [
    {"id": "c1", "session": "s", "messages": [{"role": "user", "content": "Hello"}]},
    {"id": "c2", "session": "t", "messages": [{"role": "user", "content": "Hello"}]},
]


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(PRICES)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl.gz"


def record(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["record", *map(str, arguments)])


def refusal(*arguments: object) -> KvauditError:
    error = record(*arguments).exception
    assert isinstance(error, KvauditError)
    assert error.exit_code == 2
    return error


def test_a_table_is_enough(prices: Path, trace: Path) -> None:
    result = record("rolling", prices, "--window", 8, "-o", trace)

    assert result.exit_code == 0
    assert result.stdout == ""
    recorded = read_trace(trace)
    assert len(recorded.requests) == 12
    request = recorded.requests[0]
    assert request.segments[0].text == "date,symbol,close\n"
    assert request.segments[1].text == " # # "
    assert request.segments[2].text == "2013-01-01,B,1.5\n"
    assert f"{request.segments[-1].text.strip()}{request.expected}\n" in [segment.text for segment in request.segments]
    assert (request.max_tokens, request.stop) == (16, ("\n",))


def test_it_says_what_was_written_and_what_is_next(prices: Path, tmp_path: Path) -> None:
    trace = tmp_path / "my trace.jsonl"

    result = record("rolling", prices, "--window", 8, "--key", "symbol", "-o", trace)

    recorded = read_trace(trace)
    segments = {s.content_id for r in recorded.requests for prompt in (r.segments, *r.prelude) for s in prompt}
    assert result.stderr.splitlines() == [
        f"wrote {trace}: 4 requests, {len(segments)} distinct segments, 2 sessions",
        f"next: kvaudit replay '{trace}' --orders 5",
    ]
    program, *arguments = shlex.split(result.stderr.splitlines()[-1].removeprefix("next: "))
    help_text = unstyle(CliRunner().invoke(app, [arguments[0], "--help"]).output)
    assert program == "kvaudit"
    assert arguments[2] in help_text


def test_every_option_reaches_the_trace(prices: Path, trace: Path) -> None:
    arguments = [
        *("--window", 3, "--stride", 2, "--key", "symbol", "--time", "date", "--limit", 5, "--seed", 7),
        *("--instruction", r"Prices:\n", "--document", r"{symbol} on {date}: {close}\n", "--separator", r"\t--\t"),
        *("--question", r"\n{symbol} on {date}: ", "--answer", "{close}!"),
        *("--max-tokens", 9, "--stop", "!", "--stop", r"\n"),
    ]

    assert record("rolling", prices, *arguments, "-o", trace).exit_code == 0

    recorded = read_trace(trace)
    assert [(r.request_id, r.session) for r in recorded.requests] == [
        *[("A-0001", "A"), ("B-0001", "B"), ("A-0002", "A"), ("B-0002", "B"), ("A-0003", "A")]
    ]
    request = recorded.requests[0]
    assert [segment.text for segment in request.segments[:-1]] == [
        "Prices:\n",
        *("\t--\t", "A on 2013-01-03: 3.5\n", "\t--\t", "A on 2013-01-04: 4.5\n", "\t--\t", "A on 2013-01-05: 5.5\n"),
        "\t--\t",
    ]
    assert request.segments[-1].text.startswith("\nA on 2013-01-0")
    assert str(request.expected).endswith(".5!")
    assert (request.max_tokens, request.stop, request.timestamp) == (9, ("!", "\n"), 1357344000.0)
    settings = {"workload": "rolling", "source": ["prices.csv"], "window": 3, "stride": 2, "key": "symbol", "seed": 7}
    assert settings.items() <= recorded.header.items()
    assert recorded.header["document"] == [r"{symbol} on {date}: {close}\n"]


def test_the_seed_changes_the_questions_alone(prices: Path, tmp_path: Path) -> None:
    traces = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        record("rolling", prices, "--window", 4, "--seed", seed, "-o", tmp_path / name)
        traces.append(read_trace(tmp_path / name))

    assert traces[0].digest == traces[1].digest != traces[2].digest
    assert [r.segments[:-1] for r in traces[0].requests] == [r.segments[:-1] for r in traces[2].requests]


def test_several_tables_are_channels(prices: Path, trace: Path, tmp_path: Path) -> None:
    news = tmp_path / "news.jsonl"
    news.write_bytes(b"".join(orjson.dumps({"date": f"2013-01-0{d}", "title": f"t{d}"}) + b"\n" for d in (3, 5)))
    documents = ["--document", "{symbol}{close} ", "--document", "news={title} "]
    questions = ["--question", "{symbol}?", "--question", "news={date}?"]

    arguments = [prices, news, "--time", "date", "--window", 19, *documents, *questions, "--separator", ""]
    assert record("rolling", *arguments, "-o", trace).exit_code == 0

    (prelude,) = read_trace(trace).requests[0].prelude
    assert "".join(segment.text for segment in prelude).startswith("A1.5 B1.5 A2.5 B2.5 A3.5 B3.5 t3 A4.5 ")


def test_no_stop_and_no_instruction(prices: Path, trace: Path) -> None:
    record("rolling", prices, "--window", 4, "--stop", "", "--instruction", "", "-o", trace)

    request = read_trace(trace).requests[0]
    assert request.stop == ()
    assert request.segments[0].kind == "document"


def test_own_documents_have_no_heading_of_all_columns(prices: Path, trace: Path) -> None:
    record("rolling", prices, "--window", 4, "--document", "{close}", "-o", trace)

    assert read_trace(trace).requests[0].segments[0].kind == "document"


def test_keys_with_too_few_events_are_named(tmp_path: Path, trace: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("key,day,n\n" + "".join(f"long,{n},x\n" for n in range(9)) + "short,1,x\nbrief,1,x\n")

    result = record("rolling", table, "--key", "key", "--window", 4, "-o", trace)

    assert "left out 2 keys with fewer than 5 events: short, brief" in result.stderr


def test_standard_input_is_a_table(prices: Path, trace: Path) -> None:
    result = CliRunner().invoke(app, ["record", "rolling", "-", "--window", "8", "-o", str(trace)], input=PRICES)

    assert result.exit_code == 0
    record("rolling", prices, "--window", 8, "-o", trace.with_name("file"))
    assert read_trace(trace).digest == read_trace(trace.with_name("file")).digest


def test_what_cannot_be_recorded_is_refused(prices: Path, trace: Path, tmp_path: Path) -> None:
    rolling = ("rolling", prices, "-o", trace)
    assert "a window of 84 with stride 1 needs 85 events, and the table has 20" in refusal(*rolling).message
    assert "--stride 9 is larger than --window 8" in refusal(*rolling, "--window", 8, "--stride", 9).message
    assert refusal(*rolling, "--document", "{clos}").hint == "columns: date, symbol, close"
    assert "is no template" in refusal(*rolling, "--question", "{close").message
    assert "there is no such file" in refusal("rolling", tmp_path / "missing.csv", "-o", trace).message
    assert "is a folder" in refusal("rolling", prices, "--window", 4, "-o", tmp_path).message
    assert "there is no such file" in refusal("import", tmp_path / "missing", "-o", trace).message
    assert "is in no known trace format" in refusal("import", prices, "-o", trace).message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prices.csv"]


@pytest.mark.parametrize("arguments", [["--window", "0"], ["--stride", "0"], ["--max-tokens", "0"], ["--limit", "0"]])
def test_numbers_below_one_are_wrong_usage(prices: Path, trace: Path, arguments: list[str]) -> None:
    result = record("rolling", prices, *arguments, "-o", trace)

    assert result.exit_code == 2
    assert arguments[0] in unstyle(result.output)


def test_chats_are_imported(tmp_path: Path, trace: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_bytes(b"".join(orjson.dumps(chat) + b"\n" for chat in CHATS))

    result = record("import", chats, "-o", trace)

    assert result.exit_code == 0
    assert result.stderr.splitlines()[2:] == [
        "2 requests set no max_tokens: 16 are replayed (--max-tokens sets another limit)",
        f"wrote {trace}: 2 requests, 1 distinct segment, 2 sessions",
        f"next: kvaudit replay {trace} --orders 2",
    ]
    assert read_trace(trace).digest == read_trace(chats).digest
    assert read_trace(trace).header["source"] == ["chats.jsonl"]


def test_requests_without_a_limit_get_the_one_that_is_given(tmp_path: Path, trace: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_bytes(orjson.dumps(CHATS[0]) + b"\n" + orjson.dumps({**CHATS[1], "max_tokens": 5}))

    result = record("import", chats, "--max-tokens", 64, "-o", trace)

    assert "1 request sets no max_tokens: 64 are replayed" in result.stderr
    assert [(request.max_tokens, request.limited) for request in read_trace(trace).requests] == [(64, True), (5, True)]
    assert "max_tokens" not in record("import", trace, "-o", trace.with_name("again")).stderr


def test_an_imported_trace_keeps_its_header(prices: Path, trace: Path, tmp_path: Path) -> None:
    record("rolling", prices, "--window", 8, "-o", trace)
    again = tmp_path / "again.jsonl.zst"

    assert record("import", trace, "-o", again, "--format", "kvaudit").exit_code == 0

    assert read_trace(again).header == read_trace(trace).header
    assert read_trace(again).digest == read_trace(trace).digest


def test_errors_are_one_line_and_a_hint(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{\n{\n')

    command = [sys.executable, "-m", "kvaudit", "record", "import", str(broken), "-o", str(tmp_path / "t")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 2
    assert result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first.startswith(f"kvaudit: error: {broken}, line 2: broken JSON at character 2: ")
    assert first.endswith(" (2 of 3 lines cannot be read)")
    assert second == "kvaudit: hint: each line holds one whole JSON object"


@pytest.mark.parametrize("command", ["rolling", "import"])
def test_help_has_examples(command: str) -> None:
    assert f"kvaudit record {command} " in unstyle(CliRunner().invoke(record_app, [command, "--help"]).output)


def test_help_loads_nothing_heavy() -> None:
    check = "import sys, kvaudit.cli.record; print([m for m in ('pyarrow', 'torch', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def test_a_table_without_columns_is_refused(tmp_path: Path, trace: Path) -> None:
    events = tmp_path / "empty.jsonl"
    events.write_text("{}\n{}\n")
    assert "has no columns" in str(refusal("rolling", events, "--window", 1, "-o", trace))


@pytest.mark.parametrize("unit", ["s", "us"])
def test_a_time_that_no_calendar_has_is_refused(tmp_path: Path, trace: Path, unit: str) -> None:
    events = tmp_path / "far.parquet"
    pq.write_table(pa.table({"t": pa.array([2**52 if unit == "s" else 2**62], pa.timestamp(unit)), "a": ["x"]}), events)
    assert "cannot be read as Parquet" in str(refusal("rolling", events, "--window", 1, "-o", trace))
