"""Whatever a log of another tool holds, reading it gives requests and what was left out, or one TraceError."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from foreign_examples import EXAMPLES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.traces import read_trace
from kvaudit.traces.hash_only import MOONCAKE, WEKA

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

LINES = [(name, line) for name, text, _ in EXAMPLES for line in text.splitlines()] + [("", MOONCAKE), ("", WEKA)]
TEXTS = [text for _, text, _ in EXAMPLES] + [MOONCAKE, WEKA]
NASTY = [
    *(b"\xff", b"\0", b"[", b"{", b"]", b"}", b'"', b"\n", b"\r", b",", b":", b"9" * 30, b"-1", b"1e999", b"NaN"),
    *(b"\\ud800", b"null", b"[]", b"{}", b'""', b"true", b"0.5", "\u2028".encode(), b"[" * 2000, b'{"a":' * 500),
]

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(
        ["system", "user", "assistant", "tool", "text", "tool_use", "tool_result", "function_call", "GENERATION"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["role", "content", "type", "text", "parts", "tool_calls", "name"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def survives(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    message = None
    try:
        trace = read_trace(path)
    except TraceError as error:
        message = error.message
    assert str(path) in message if message else trace.requests


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value, in JSON texts inside it too."""
    found: list[tuple[Any, Any]] = []
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found += [(value, key), *places(value[key])]
    return found


@same_folder
@given(st.sampled_from(TEXTS), st.integers(0, 2**32), st.integers(1, 6))
def test_mutated_bytes(tmp_path: Path, text: str, seed: int, changes: int) -> None:
    generator = random.Random(seed)
    mutated = bytearray(text.encode())
    for _ in range(changes):
        at = generator.randrange(len(mutated))
        match generator.randrange(3):
            case 0:
                mutated[at : at + generator.randrange(1, 9)] = b""
            case 1:
                mutated[at:at] = generator.choice(NASTY)
            case 2:
                other = generator.randrange(len(mutated))
                mutated[at:at] = mutated[other : other + 60]
        assume(mutated)
    survives(tmp_path / "t", bytes(mutated))


@settings(same_folder, max_examples=300)
@given(st.data())
def test_fields_with_any_value(tmp_path: Path, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    lines = [text] if text.startswith(("{\n", "[")) else text.splitlines()
    values = (
        [orjson.loads(line) for line in lines] if text.count("\n") and "log" not in text[:10] else [orjson.loads(text)]
    )
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(values)))
        match data.draw(st.integers(0, 4)):
            case 0 if isinstance(container, dict):
                container.pop(key, None)
            case 1 if isinstance(container, dict):
                container[data.draw(st.sampled_from([str(key) + "s", "error", "status", "type"]))] = data.draw(
                    json_values
                )
            case 2:
                container[key] = orjson.dumps(container.get(key) if isinstance(container, dict) else None).decode()
            case _:
                container[key] = data.draw(json_values)
        assume(values)
    survives(tmp_path / "t", b"\n".join(orjson.dumps(value) for value in values))


@same_folder
@given(st.lists(st.sampled_from([line for _, line in LINES]), min_size=1, max_size=6))
def test_lines_of_several_formats(tmp_path: Path, lines: list[str]) -> None:
    survives(tmp_path / "t", "\n".join(lines).encode())


@same_folder
@given(st.data())
def test_rows_of_parquet(tmp_path: Path, data: st.DataObject) -> None:
    columns = (
        "id",
        "trace_id",
        "run_type",
        "type",
        "inputs",
        "input",
        "outputs",
        "extra",
        "start_time",
        "error",
        "level",
    )
    names = data.draw(st.lists(st.sampled_from(columns), min_size=1, unique=True))
    words = ["llm", "GENERATION", '{"prompts": ["x"]}', '[{"role": "user", "content": "x"}]', "[1]", "{", ""]
    kinds = st.sampled_from([pa.string(), pa.binary(), pa.int64(), pa.list_(pa.string()), pa.timestamp("ns")])
    arrays = []
    for _ in names:
        kind = data.draw(kinds)
        value = data.draw(st.sampled_from(words))
        held: Any = value if kind == pa.string() else value.encode() if kind == pa.binary() else 7
        arrays.append(pa.array([[value] if pa.types.is_list(kind) else held, None], kind))
    path = tmp_path / "t"
    pq.write_table(pa.Table.from_arrays(arrays, names=names), path)

    survives(path, path.read_bytes())


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_files_and_their_cut_ends(tmp_path: Path, text: str, compress: Any) -> None:
    whole = compress(text.encode())

    survives(tmp_path / "t", whole)
    for at in range(5, len(whole) - 1, 29):
        survives(tmp_path / "t", whole[:at])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ('{"a":' * 300 + "1" + "}" * 300, 1),
        ('{"a":' * 2000 + "1" + "}" * 2000, 1),
        ("9" * 30, 2),
        ("9" * 400, 1),
        ('"\\ud800"', 1),
        ("NaN", 1),
        ('{"a": 1, "a": 2}', 2),
    ],
)
def test_odd_json_in_tools(tmp_path: Path, value: str, kept: int) -> None:
    """Too deep to be written again or no JSON at all: left out, with its line."""
    line = '{"messages": [{"role": "user", "content": "Hi"}], "tools": %s}\n'
    (tmp_path / "t").write_text(line % "[]" + line % f"[{value}]")

    trace = read_trace(tmp_path / "t")

    assert len(trace.requests) == kept
    left_out: Any = trace.header.get("left_out", [])
    assert [place.partition(" (")[0] for row in left_out for place in row["places"]] == ["line 2"] * (2 - kept)


@pytest.mark.parametrize("text", TEXTS)
def test_deep_values_are_survived(tmp_path: Path, text: str) -> None:
    deep = [b'{"values":[' * 240 + b"1" + b"]}" * 240, b"[" * 1000 + b"]" * 1000]
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = orjson.loads(text.splitlines()[0])
    for container, key in places(value):
        kept = container[key]
        container[key] = "<deep>"
        content = orjson.dumps(value)
        container[key] = kept
        for nested in deep:
            survives(tmp_path / "t", content.replace(b'"<deep>"', nested))


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    (tmp_path / "t").write_bytes(orjson.dumps(long))

    assert len(read_trace(tmp_path / "t").requests[0].segments[0].text) == 10_000_000
