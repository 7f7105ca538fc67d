"""Traces request by request: the same requests and errors as `read_trace`, in bounded memory."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from fakes import rolling_trace

from kvaudit.errors import TraceError
from kvaudit.records import Request
from kvaudit.traces import read_trace
from kvaudit.traces.segments import make_segment
from kvaudit.traces.streaming import StreamedTrace, open_trace
from kvaudit.traces.writer import write_trace

FIXTURE = Path(__file__).parents[2] / "fixtures" / "rolling.jsonl.gz"
CHATS = b'{"messages": [{"role": "user", "content": "Hi"}]}\n'


def streamed(path: Path, name: str | None = None) -> Iterator[Request]:
    with open_trace(path, name) as trace:
        assert isinstance(trace, StreamedTrace)
        yield from trace.requests


def test_the_same_requests_as_reading_it_whole() -> None:
    assert tuple(streamed(FIXTURE)) == read_trace(FIXTURE).requests
    assert tuple(streamed(FIXTURE, "kvaudit")) == read_trace(FIXTURE).requests


def test_other_formats_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(CHATS * 2)

    assert tuple(streamed(path)) == read_trace(path).requests
    assert len(tuple(streamed(path, "messages"))) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b'{"kvaudit_trace": 1}\n',
        b'{"request": "a", "segments": []}\n',
        b'{"request": "a", "segments": ["nope"]}\n',
        b'{"request": "a", "segments": [{"kind": "document", "text": ""}]}\n',
        b'{"request": "a", "segments": [{"kind": "document", "text": "x"}], "prelude": [[]]}\n',
        b'{"request": "a", "segments": [{"kind": "document", "text": "x"}]}\n' * 2,
        b'{"request": "a", "segments": [{"kind": "document", "text": "x"}]}\n{broken',
        b'{"request": "a", "segments": [{"kind": "document", "text": "x"}], "chat": true}\n',
        gzip.compress(CHATS, mtime=0)[:20],
    ],
)
@pytest.mark.parametrize("name", [None, "kvaudit"])
def test_the_same_errors_as_reading_it_whole(content: bytes, name: str | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as whole:
        read_trace(path, name)
    with pytest.raises(TraceError) as one_by_one:
        list(streamed(path, name))

    assert str(one_by_one.value) == str(whole.value)


def test_a_request_comes_before_the_next_line_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"request": "a", "segments": [{"kind": "document", "text": "x"}]}\n{broken')

    assert next(streamed(path)).request_id == "a"


def test_a_blank_segment_is_seen_wherever_it_is_defined(tmp_path: Path) -> None:
    blank, sound = make_segment("document", ""), make_segment("document", "x")
    lines = [
        {"segment": sound.content_id, "kind": "document", "text": "x"},
        {"request": "a", "segments": [sound.content_id]},
        {"segment": blank.content_id, "kind": "document", "text": ""},
        {"request": "b", "segments": [sound.content_id, blank.content_id]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))

    with pytest.raises(TraceError, match=r"request 'b' has no text in segment 2 \(document\)"):
        list(streamed(path))


def test_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    """Each request refers to 2,000 segments; kept, the longer trace's would take 60 MB more."""
    program = (
        "import sys, resource; from pathlib import Path; from kvaudit.traces.streaming import open_trace\n"
        "with open_trace(Path(sys.argv[1])) as trace:\n"
        "    for request in trace.requests: pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    segments = rolling_trace(1, 1000).requests[0].segments
    peaks = []
    for count in (100, 4000):
        path = tmp_path / f"{count}.jsonl"
        real = tuple(make_segment(part.kind, part.text) for part in segments)
        write_trace(path, (Request(f"r{n}", n, real) for n in range(count)))
        out = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
        peaks.append(int(out.stdout))

    assert peaks[1] - peaks[0] < 20_000
