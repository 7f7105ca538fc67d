"""What is written is what is read; a file is whole or not there."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.records import KINDS, Request, Segment
from kvaudit.traces import read_trace
from kvaudit.traces.segments import SegmentPool, make_segment
from kvaudit.traces.writer import write_trace

DOCUMENT = make_segment("document", "a document\n")
REQUEST = Request("r1", 0, (DOCUMENT,))

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
token_ids = st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple)
segments = st.builds(make_segment, st.sampled_from(KINDS), texts, st.none() | texts, token_ids)
messages = st.builds(make_segment, st.sampled_from(KINDS), texts | st.just(""), texts)
prompts = st.lists(segments, min_size=1, max_size=4).map(tuple)
chats = st.lists(messages, min_size=1, max_size=4).map(tuple)


@st.composite
def request_lists(draw: st.DrawFn) -> list[Request]:
    ids = draw(st.lists(texts, min_size=1, max_size=3, unique=True))
    made = []
    for ordinal, request_id in enumerate(ids):
        chat = draw(st.booleans())
        prompt = chats if chat else prompts
        made.append(
            Request(
                request_id=request_id,
                ordinal=ordinal,
                segments=draw(prompt),
                prelude=tuple(draw(st.lists(prompt, max_size=2))),
                session=draw(st.none() | texts),
                max_tokens=draw(st.integers(1, 2**31)),
                stop=tuple(draw(st.lists(texts, max_size=2))),
                chat=chat,
                expected=draw(st.none() | st.text(st.characters(exclude_categories=["Cs"]))),
                timestamp=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
            )
        )
    return made


def without_lines(requests: tuple[Request, ...]) -> list[Request]:
    names = [name for name in Request.__dataclass_fields__ if name != "line"]
    return [Request(**{name: getattr(request, name) for name in names}) for request in requests]


@settings(deadline=None)
@given(request_lists(), st.sampled_from(["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"]))
@example([Request("\u2028\x00\x1f\x85", 0, (make_segment("query", "\u2028\n\r\x00\x0c😀\ufeff"),))], "t.jsonl")
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request], name: str
) -> None:
    path = tmp_path_factory.mktemp("trace") / name

    written = write_trace(path, requests, {"made_for": "a test"})
    trace = read_trace(path)

    assert without_lines(trace.requests) == requests
    assert trace.digest == written.digest
    assert trace.header["made_for"] == "a test"
    used = {segment for request in requests for prompt in (request.segments, *request.prelude) for segment in prompt}
    assert (written.requests, written.distinct_segments) == (len(requests), len(used))
    assert written.sessions == len({request.session for request in requests if request.session is not None})


@given(st.text())
def test_text_that_is_no_unicode_is_refused_and_all_other_is_kept(text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        with pytest.raises(TraceError, match="half of a surrogate pair"):
            make_segment("document", text)
    else:
        assert make_segment("document", text).text == text


@given(segments, segments)
def test_content_ids_tell_contents_apart(one: Segment, other: Segment) -> None:
    assert (one.content_id == other.content_id) is (one == other)


def test_a_content_id_is_what_it_was() -> None:
    """Traces that exist hold these ids."""
    assert make_segment("document", "a\n").content_id == "6630899d0224ed9b"
    assert make_segment("message", "a\n", "user").content_id == "b179626c996234e9"
    assert make_segment("query", "a", None, (1, 22)).content_id == "a803be7d56f58bd6"


def test_segments_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, [Request(f"r{n}", n, (DOCUMENT, DOCUMENT), ((DOCUMENT,),)) for n in range(50)])

    assert path.read_text().count("a document") == 1


def test_compressed_bytes_hold_no_time_or_name_and_a_checksum(tmp_path: Path) -> None:
    gzipped, zstd = tmp_path / "t.gz", tmp_path / "t.zst"
    write_trace(gzipped, [REQUEST])
    write_trace(zstd, [REQUEST])

    no_name, no_time = 0, bytes(4)
    assert (gzipped.read_bytes()[3], gzipped.read_bytes()[4:8]) == (no_name, no_time)
    assert zstandard.get_frame_parameters(zstd.read_bytes()).has_checksum
    assert gzip.decompress(gzipped.read_bytes()).startswith(b'{"kvaudit_trace":1,"made_by":"kvaudit ')


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (Request("r1", 1, (DOCUMENT,)), "request 'r1' has the id of request 1"),
        (Request("", 1, (DOCUMENT,)), "request '' has an empty id"),
        (Request("r2", 1, ()), "request 'r2' has no segments"),
        (Request("r2", 1, (make_segment("query", ""),)), "request 'r2' has no text in segment 1 (query)"),
        (Request("r2", 1, (DOCUMENT,), max_tokens=0), "request 'r2' has max_tokens 0"),
        (Request("r2", 1, (DOCUMENT,), chat=True), "is a chat, and segment 1 has no role"),
        (Request("r2", 1, (Segment("query", "5", "x"),)), "whose id '5' is not that of its content"),
        (Request("r2", 1, (Segment("poem", "5", "x"),)), "request 'r2': 'poem' is no kind of segment"),
        (Request("r2", 1, (Segment("query", "5", "\udc80"),)), "half of a surrogate pair (U+DC80)"),
        (Request("r\ud800", 1, (DOCUMENT,)), "cannot be written as JSON"),
        (Request("r2", 1, (DOCUMENT,), stop=("\ud800",)), "cannot be written as JSON"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, request_: Request, what: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"what was there")

    with pytest.raises(TraceError) as caught:
        write_trace(path, [REQUEST, request_])

    assert what in str(caught.value)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"what was there"]


def test_a_trace_without_requests_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="there are no requests"):
        write_trace(tmp_path / "t.jsonl", [])

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_of_a_trace_that_was_cut_off(tmp_path: Path, stop: type[BaseException]) -> None:
    path = tmp_path / "t.jsonl.zst"

    def requests() -> Iterator[Request]:
        yield REQUEST
        assert not path.exists()
        assert list(tmp_path.iterdir())
        raise stop

    with pytest.raises(stop):
        write_trace(path, requests())

    assert not list(tmp_path.iterdir())


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"^{tmp_path} is a folder"):
        write_trace(tmp_path, [REQUEST])
    with pytest.raises(TraceError, match="there is no folder"):
        write_trace(tmp_path / "missing" / "t.jsonl", [REQUEST])
    with pytest.raises(TraceError, match="is no regular file"):
        write_trace(Path("/dev/null"), [REQUEST])
    with pytest.raises(TraceError, match="cannot be written: File name too long"):
        write_trace(tmp_path / ("x" * 300), [REQUEST])
    with pytest.raises(TraceError, match="cannot be written: embedded null"):
        write_trace(tmp_path / "a\0b", [REQUEST])
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs Linux's /dev/full")
    monkeypatch.setattr(Path, "open", lambda *_: open(full, "wb"))  # noqa: SIM115

    with pytest.raises(TraceError, match="cannot be written: No space left on device"):
        write_trace(tmp_path / "t.jsonl", [REQUEST])


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "t.jsonl")

    write_trace(tmp_path / "link", [REQUEST])

    assert (tmp_path / "link").is_symlink()
    assert read_trace(tmp_path / "t.jsonl").requests[0].segments == (DOCUMENT,)


def test_a_long_rolling_trace_costs_one_document_a_request(tmp_path: Path) -> None:
    def requests() -> Iterator[Request]:
        pool = SegmentPool()
        window = [pool.intern("document", f"{n} {'x' * 300}") for n in range(84)]
        for n in range(1000):
            before = tuple(window)
            window = [*window[1:], make_segment("document", f"{n + 84} {'x' * 300}")]
            yield Request(f"r{n}", n, tuple(window), (before,))

    path = tmp_path / "t.jsonl"
    tracemalloc.start()
    write_trace(path, requests())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert sum("segment" in line for line in lines) == 1084
    assert peak < 2_000_000
