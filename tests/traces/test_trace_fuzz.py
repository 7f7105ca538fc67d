"""Whatever bytes a trace has, reading it gives a trace or a TraceError."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.traces import read_trace
from kvaudit.traces.segments import make_segment

SEGMENT = make_segment("document", "a document\n")
LINES: list[dict[str, object]] = [
    {"kvaudit_trace": 1, "made_by": "test"},
    {"segment": SEGMENT.content_id, "kind": "document", "text": SEGMENT.text},
    {
        "request": "r1",
        "segments": [SEGMENT.content_id, {"kind": "query", "text": "which?", "token_ids": [1, 2]}],
        "prelude": [[SEGMENT.content_id]],
        "session": "s",
        "max_tokens": 5,
        "stop": ["\n"],
        "expected": "this",
        "timestamp": 1.5,
    },
    {"request": "r2", "segments": [{"kind": "query", "role": "user", "text": "which?"}], "chat": True},
]
CHATS: list[dict[str, object]] = [
    {"id": 1, "session": "s", "messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "?"}]},
    {"custom_id": "c", "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}]}]},
]
NATIVE, MESSAGES = (b"".join(orjson.dumps(line) + b"\n" for line in lines) for lines in (LINES, CHATS))
COMPRESSED = [gzip.compress(NATIVE), zstandard.compress(NATIVE), gzip.compress(MESSAGES), zstandard.compress(MESSAGES)]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def survives(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    message = None
    try:
        trace = read_trace(path)
    except TraceError as error:
        message = error.message
    assert (str(path) in message and "\n" not in message) if message else trace.requests


@pytest.mark.parametrize("content", [NATIVE, MESSAGES, *COMPRESSED])
def test_the_untouched_traces_are_sound(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)

    assert len(read_trace(tmp_path / "t").requests) == 2


@same_folder
@given(
    st.binary(max_size=200), st.sampled_from([b"", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b'{"messages":', b'{"request":'])
)
def test_random_bytes(tmp_path: Path, content: bytes, start: bytes) -> None:
    survives(tmp_path / "t", start + content)


@same_folder
@given(st.sampled_from([NATIVE, MESSAGES, *COMPRESSED]), st.integers(0, 2**32), st.integers(1, 8))
def test_mutated_bytes(tmp_path: Path, content: bytes, seed: int, changes: int) -> None:
    generator = random.Random(seed)
    mutated = bytearray(content)
    for _ in range(changes):
        at = generator.randrange(len(mutated))
        match generator.randrange(4):
            case 0:
                mutated[at] ^= 1 << generator.randrange(8)
            case 1:
                mutated[at : at + generator.randrange(1, 9)] = b""
            case 2:
                mutated[at:at] = generator.choice([b"\xff", b"\0", b"[", b"{", b'"', b"\n", b"9" * 30, b"\\ud800"])
            case 3:
                other = generator.randrange(len(mutated))
                mutated[at:at] = mutated[other : other + 40]
        assume(mutated)
    survives(tmp_path / "t", bytes(mutated))


@same_folder
@given(st.data())
def test_fields_with_any_value(tmp_path: Path, data: st.DataObject) -> None:
    lines = orjson.loads(orjson.dumps(data.draw(st.sampled_from([LINES, CHATS]))))
    target = data.draw(st.sampled_from(lines))
    while True:
        key = data.draw(st.sampled_from(list(target) if isinstance(target, dict) else range(len(target))))
        if not isinstance(target[key], dict | list) or not target[key] or data.draw(st.booleans()):
            break
        target = target[key]
    target[key] = data.draw(json_values)

    survives(tmp_path / "t", b"".join(orjson.dumps(line) + b"\n" for line in lines))


@same_folder
@given(st.permutations(NATIVE.splitlines(keepends=True) + MESSAGES.splitlines(keepends=True)), st.integers(1, 6))
def test_shuffled_lines(tmp_path: Path, lines: list[bytes], kept: int) -> None:
    survives(tmp_path / "t", b"".join(lines[:kept]))
