"""Logs of which a part cannot be read: the rest is taken, and what is lost is told."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces import read_trace


def chat(name: str) -> bytes:
    return orjson.dumps({"id": name, "messages": [{"role": "user", "content": f"Hi {name} {'.' * 40}"}]})


def ids(trace: Trace) -> list[str]:
    return [request.request_id for request in trace.requests]


def left_out(trace: Trace) -> list[dict[str, Any]]:
    rows: Any = trace.header.get("left_out", [])
    return list(rows)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_lines_that_cannot_be_read_are_left_out_and_counted_by_what_is_wrong(file: Path) -> None:
    file.write_bytes(
        b"\n".join(
            [
                b"starting ...",
                chat("a"),
                b'{"id": "x',
                chat("b"),
                b"[1]",
                chat("c"),
                b"\xff",
                chat("d"),
                b"\0\0",
                chat("e"),
            ]
        )
    )

    trace = read_trace(file)

    assert ids(trace) == ["a", "b", "c", "d", "e"]
    assert [request.line for request in trace.requests] == [2, 4, 6, 8, 10]
    assert [(row["reason"], row["count"]) for row in left_out(trace)] == [
        ("broken JSON", 3),
        ("not a JSON object but a list", 1),
        ("not UTF-8", 1),
    ]
    assert [place.partition(":")[0] for place in left_out(trace)[0]["places"]] == [
        "line 1 (character 1",
        "line 3 (character 10",
        "line 9 (character 1",
    ]
    assert left_out(trace)[2]["places"] == ["line 7 (byte 1)"]
    assert trace.header["records"] == 10


def test_a_file_with_more_lines_that_cannot_be_read_than_can_is_refused(file: Path) -> None:
    file.write_bytes(b"\n".join([chat("a"), b"{", chat("b"), b"{"]))
    assert ids(read_trace(file)) == ["a", "b"]

    file.write_bytes(file.read_bytes() + b"\n{")
    with pytest.raises(TraceError, match=rf"^{file}, line 2: broken JSON .* \(3 of 5 lines cannot be read\)"):
        read_trace(file)


def test_a_format_is_told_by_the_first_line_that_can_be_read(file: Path) -> None:
    file.write_bytes(b"\n".join([b"[begin]", b"{", *map(chat, "abc")]))

    assert ids(read_trace(file)) == ["a", "b", "c"]
    assert ids(read_trace(file, "messages")) == ["a", "b", "c"]


def test_a_text_in_which_no_line_is_an_object_is_in_no_format(file: Path) -> None:
    file.write_text("Some words.\n" * 300)

    with pytest.raises(TraceError, match="in no known trace format: line 1: broken JSON"):
        read_trace(file)


def test_entries_of_an_array_that_are_no_objects_are_left_out(file: Path) -> None:
    entries = [orjson.loads(chat("a")), None, orjson.loads(chat("b"))]
    file.write_bytes(orjson.dumps(entries))

    trace = read_trace(file)
    assert ids(trace) == ["a", "b"]
    assert left_out(trace) == [{"reason": "not a JSON object", "count": 1, "places": ["entry 2"]}]

    file.write_bytes(orjson.dumps([entries[0], None, 7]))
    with pytest.raises(TraceError, match=r"entry 2: not a JSON object"):
        read_trace(file)


@pytest.mark.parametrize("entries", [1, 2])
def test_entries_of_a_document_are_not_taken_for_lines(file: Path, entries: int) -> None:
    """The last entry, behind which no comma stands, is an object on a line of its own."""
    entry = {"method": "POST", "url": "/v1/completions", "postData": {"text": '{"prompt": "Once"}'}}
    lines = [orjson.dumps({"request": entry, "response": {"status": 200}}) for _ in range(entries)]
    file.write_bytes(b'{"log": {"entries": [\n' + b",\n".join(lines) + b"\n]}}\n")

    assert ids(read_trace(file)) == [f"entry-{number}" for number in range(1, entries + 1)]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_of_a_compressed_file_that_is_cut_off_what_stands_before_is_read(file: Path, compress: Any) -> None:
    """Texts that hardly compress, so that a cut loses little of what stands before it."""
    lines = [orjson.dumps({"id": str(n), "messages": [{"role": "user", "content": _noise(n)}]}) for n in range(120)]
    whole = compress(b"\n".join(lines))
    file.write_bytes(whole)
    assert "notes" not in read_trace(file).header

    kept = []
    for part in (0.4, 0.7, 0.95):
        file.write_bytes(whole[: int(len(whole) * part)])
        trace = read_trace(file)
        assert ids(trace) == [str(n) for n in range(len(trace.requests))]
        assert trace.header["notes"] == [
            f"the compressed file is cut off behind line {len(trace.requests)}: what stands before that is read"
        ]
        kept.append(len(trace.requests))
    assert kept == sorted(kept)
    assert 90 < kept[-1] < 120


def _noise(seed: int) -> str:
    from random import Random

    return Random(seed).randbytes(4000).hex()


@pytest.mark.parametrize("broken", [b"{", b"[]", b"\xff", b'{"request": {}}'])
def test_a_trace_of_kvaudits_own_is_read_whole_or_not_at_all(file: Path, broken: bytes) -> None:
    request = b'{"request": "%s", "segments": [{"kind": "query", "text": "Hi"}]}\n'
    file.write_bytes(b'{"kvaudit_trace": 1}\n' + request % b"a" + request % b"b" + broken + b"\n" + request % b"c")

    with pytest.raises(TraceError, match=rf"^{file}, line 4: "):
        read_trace(file)


def test_a_trace_of_kvaudits_own_that_is_cut_off_is_an_error(file: Path) -> None:
    lines = [
        b'{"request": "%d", "segments": [{"kind": "query", "text": "%s"}]}' % (n, _noise(n).encode()) for n in range(9)
    ]
    whole = gzip.compress(b"\n".join(lines))
    file.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(TraceError, match="cannot be read: it ends in the middle of compressed data"):
        read_trace(file)


@pytest.mark.parametrize("request_body", [{"messages": []}, None])
def test_exchanges_without_the_header_of_their_capture_are_named_as_that(file: Path, request_body: object) -> None:
    exchange = {"exchange": "r1-1", "api": "chat", "request": request_body, "outcome": "complete"}
    file.write_bytes(orjson.dumps(exchange))

    with pytest.raises(TraceError, match=rf"^{file} holds exchanges of a capture, and lacks the header") as caught:
        read_trace(file)

    header = str(caught.value.hint).partition("the line ")[2].partition(" before")[0]
    exchange["request"] = {"messages": [{"role": "user", "content": "Hi"}]}
    file.write_bytes(header.encode() + b"\n" + orjson.dumps(exchange))
    assert ids(read_trace(file)) == ["r1-1"]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([b"{", b"[]", b"\xff", b"7", b"null", b" ", b"sound"]), max_size=12))
def test_whatever_is_broken_every_line_is_a_request_or_counted(file: Path, kinds: list[bytes]) -> None:
    lines = [chat(str(at)) if kind == b"sound" else kind for at, kind in enumerate([b"sound", *kinds])]
    file.write_bytes(b"\n".join(lines))
    sound = [str(at) for at, kind in enumerate([b"sound", *kinds]) if kind == b"sound"]
    others = sum(kind not in (b" ", b"sound") for kind in kinds)

    if others > len(sound):
        with pytest.raises(TraceError, match=f"{others} of {others + len(sound)} lines cannot be read"):
            read_trace(file)
        return
    trace = read_trace(file)
    assert ids(trace) == sound
    assert sum(row["count"] for row in left_out(trace)) == others
