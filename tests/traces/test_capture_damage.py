"""Of a capture that is damaged, only what is damaged is lost."""

from __future__ import annotations

import gzip
import io
from itertools import accumulate
from pathlib import Path

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.records import Trace
from kvaudit.traces import read_trace
from kvaudit.traces.damaged import Lost, codec_of, readable_lines
from kvaudit.traces.tally import told_left_out

HEADER = b'{"kvaudit_capture": 1, "upstream": "http://x"}\n'
GARBAGE = [b"\0" * 5000, b"garbage", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd" * 3, b"\xff" * 70_000]
CODECS = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor(write_checksum=True).compress}


def exchange(number: int) -> bytes:
    body = {"messages": [{"role": "user", "content": f"{number} " + "word " * 20 * number}]}
    return orjson.dumps(
        {"exchange": f"r1-{number}", "api": "chat", "started": number, "outcome": "complete", "request": body},
        option=orjson.OPT_APPEND_NEWLINE,
    )


LINES = [HEADER, *map(exchange, range(1, 6))]


def ids(trace: Trace) -> list[str]:
    return [request.request_id for request in trace.requests]


def told(trace: Trace) -> list[str]:
    rows, notes = trace.header.get("left_out", []), trace.header.get("notes", [])
    assert isinstance(rows, list)
    assert isinstance(notes, list)
    return [*map(told_left_out, rows), *notes]


def frames(codec: str) -> list[bytes]:
    return [CODECS[codec](line) for line in LINES]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("place", [1, 3, 6])
def test_garbage_between_frames_and_behind_them_costs_nothing_else(
    tmp_path: Path, codec: str, garbage: bytes, place: int
) -> None:
    path = tmp_path / "capture"
    made = frames(codec)
    path.write_bytes(b"".join(made[:place]) + garbage + b"".join(made[place:]))

    trace = read_trace(path)

    assert ids(trace) == [f"r1-{number}" for number in range(1, 6)]
    (said,) = told(trace)
    assert "damaged" in said or "cut off" in said


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 2])
def test_a_frame_that_begins_at_the_border_of_what_is_searched_at_once_is_found(codec: str, size: int) -> None:
    made = frames(codec)

    with io.BytesIO(b"".join([made[0], b"x" * size, *made[1:]])) as stream:
        items = list(readable_lines(stream, codec))

    lost = Lost(len(made[0]), len(made[0]) + size, cut=False)
    assert items == [LINES[0], lost, *LINES[1:]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_a_damaged_frame_is_lost_alone_and_told(tmp_path: Path, codec: str, at: float) -> None:
    path = tmp_path / "capture"
    made = frames(codec)
    hurt = bytearray(made[3])
    place = int(at * len(hurt))
    hurt[place : place + 4] = bytes(byte ^ 0x5A for byte in hurt[place : place + 4])
    path.write_bytes(b"".join([*made[:3], bytes(hurt), *made[4:]]))

    trace = read_trace(path)

    assert ids(trace) == ["r1-1", "r1-2", "r1-4", "r1-5"]
    assert told(trace) == [
        f"{len(hurt):,} bytes of the capture behind line 3, from byte {sum(map(len, made[:3])):,} on, are damaged: "
        "what stood there is lost"
    ]


def test_broken_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "capture.jsonl"
    odd = [b'{"exchange": "r1-9", "ap\n', b"[]\n", b"7\n", b"{}\n", b"\0\0\0\n"]
    path.write_bytes(b"".join([*LINES[:2], *odd, *LINES[2:]]))

    trace = read_trace(path)

    assert ids(trace) == [f"r1-{number}" for number in range(1, 6)]
    neither, broken = told(trace)
    assert neither == "3 neither an exchange nor the header of a capture: line 4, line 5, line 6"
    assert broken.startswith("2 broken JSON: line 3 (")
    assert ", line 7 (" in broken


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_of_many_lines_gives_those_before_the_damage(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "capture"
    many = [exchange(number) for number in range(1, 400)]
    path.write_bytes(CODECS[codec](HEADER + b"".join(many))[:-20] + CODECS[codec](exchange(900)))

    found = ids(read_trace(path))

    assert found[-1] == "r1-900"
    assert found[:-1] == [f"r1-{number}" for number in range(1, len(found))]
    assert len(found) > 100


class CountedReads(io.BytesIO):
    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.taken += len(found)
        return found


LIKE_BEGINNINGS = {
    "gzip": [
        b"\x1f\x8b\x08",
        b"\x1f\x8b\x08\x08" + b"name" * 3,
        b"\x1f\x8b\x08\0\0\0\0\0\0\0" + b"\0\xff\xff\0\0",
    ],
    "zstd": [b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\0\x58\0\0\x10", b"\x28\xb5\x2f\xfd\0\x58\x04\0\x10"],
}


@pytest.mark.parametrize(
    ("codec", "garbage"), [(codec, garbage) for codec, all_of in LIKE_BEGINNINGS.items() for garbage in all_of]
)
def test_garbage_that_looks_like_beginnings_costs_reads_in_proportion_to_its_size(codec: str, garbage: bytes) -> None:
    made, taken = frames(codec), []
    for size in (100_000, 200_000):
        data = b"".join([*made[:2], garbage * (size // len(garbage)), *made[2:]])
        with CountedReads(data) as stream:
            items = list(readable_lines(stream, codec))
            taken.append(stream.taken / size)

        assert items[:2] == LINES[:2]
        assert any(isinstance(item, Lost) for item in items)
    assert max(taken) < 400
    assert taken[1] < 1.3 * taken[0]


@pytest.mark.parametrize("times", [10, 10_000])
def test_what_is_whole_is_found_behind_many_beginnings_of_gzip(times: int) -> None:
    made = frames("gzip")

    with io.BytesIO(b"".join([made[0], b"\x1f\x8b\x08" * times, *made[1:]])) as stream:
        items = list(readable_lines(stream, "gzip"))

    assert [item for item in items if isinstance(item, bytes)] == LINES


@pytest.mark.parametrize("codec", CODECS)
def test_an_empty_frame_and_a_long_one_behind_damage_are_read(codec: str) -> None:
    long = b'{"a": "' + bytes(range(48, 58)) * 50_000 + b'"}\n'
    noise = orjson.dumps([hash((n, 3)) % 2**40 for n in range(60_000)]) + b"\n"
    data = b"".join([CODECS[codec](LINES[0]), b"garbage", *map(CODECS[codec], (b"", long, noise, b""))])

    with io.BytesIO(data) as stream:
        items = list(readable_lines(stream, codec))

    assert [item for item in items if isinstance(item, bytes)] == [LINES[0], long, noise]


@given(
    st.sampled_from(sorted(CODECS)),
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=8),
    st.binary(max_size=40),
)
def test_frames_that_nothing_happened_to_are_read(
    codec: str, hurt: int, flips: list[tuple[float, int]], between: bytes
) -> None:
    made = frames(codec)
    damaged = bytearray(made[hurt])
    for at, flip in flips:
        damaged[int(at * len(damaged))] ^= flip
    data = b"".join([*made[:hurt], bytes(damaged), between, *made[hurt + 1 :]])
    others = [line for number, line in enumerate(LINES) if number != hurt]

    with io.BytesIO(data) as stream:
        assert codec_of(stream) == codec
        items = list(readable_lines(stream, codec))

    lines = [item for item in items if isinstance(item, bytes)]
    assert [line for line in lines if line in others] == others
    ends = list(accumulate(map(len, [b"".join(made[:hurt]), bytes(damaged) + between])))
    for lost in (item for item in items if isinstance(item, Lost)):
        assert ends[0] <= lost.start < lost.end <= ends[1]
