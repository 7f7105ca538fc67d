"""The rolling agent: windows, preludes, questions, keys."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.records import Request
from kvaudit.traces.events import Event
from kvaudit.traces.rolling import Rolling, rolling_requests, too_short

ROLLING = Rolling(window=3, instruction="I", separator="|", max_tokens=5, stop=(",",))


def stream(count: int, name: str = "d", start: float = 0) -> list[Event]:
    return [Event(f"{name}{n}", f"{name}{n}?", f"{name}{n}!", start + n, start + n) for n in range(1, count + 1)]


def requests(streams: Mapping[str, Sequence[Event]], rolling: Rolling = ROLLING) -> list[Request]:
    return list(rolling_requests(streams, rolling))


def texts(request: Request) -> str:
    return " ".join(segment.text for segment in request.segments)


def test_the_window_moves_by_one_and_the_window_before_is_the_prelude() -> None:
    first, second = requests({"agent": stream(5)})

    assert [segment.kind for segment in first.segments] == [
        "instruction",
        *("separator", "document") * 3,
        "separator",
        "query",
    ]
    assert texts(first) == f"I | d2 | d3 | d4 | {first.segments[-1].text}"
    assert [segment.text for segment in first.prelude[0]] == ["I", "|", "d1", "|", "d2", "|", "d3"]
    assert first.segments[:-2] == second.prelude[0]
    assert texts(second).startswith("I | d3 | d4 | d5 | ")
    assert (first.request_id, first.session, first.ordinal) == ("agent-0001", "agent", 0)
    assert (first.max_tokens, first.stop, first.timestamp, first.chat) == (5, (",",), 4, False)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_every_request_keeps_all_but_stride_documents(events: int, window: int, stride: int, seed: int) -> None:
    rolling = replace(ROLLING, window=window, stride=min(stride, window), seed=seed)
    made = requests({"a": stream(events)}, rolling)

    assert len(made) == max(0, (events - window) // rolling.stride)
    for request in made:
        now = [segment for segment in request.segments if segment.kind == "document"]
        (prelude,) = request.prelude
        before = [segment for segment in prelude if segment.kind == "document"]
        assert len(now) == len(before) == window
        assert now[: window - rolling.stride] == before[rolling.stride :]
        assert f"{request.segments[-1].text[:-1]}!" == request.expected
        assert request.segments[-1].text[:-1] in {segment.text for segment in now}


def test_the_papers_workload_has_the_papers_number_of_requests() -> None:
    """15 equities, 8,995 events, a window of 84: 7,735 updates (section 4.1)."""
    lengths = [600] * 14 + [8995 - 14 * 600]
    streams = {f"e{n}": stream(length, f"e{n}-") for n, length in enumerate(lengths)}

    assert sum(1 for _ in rolling_requests(streams, Rolling())) == 7735


def test_keys_are_interleaved_by_the_time_of_their_newest_document() -> None:
    made = requests({"a": stream(6, "a", start=10), "b": stream(6, "b", start=8.5)})

    assert [request.request_id for request in made] == ["b-0001", "b-0002", "a-0001", "b-0003", "a-0002", "a-0003"]
    assert [request.session for request in made] == ["b", "b", "a", "b", "a", "a"]
    assert [request.ordinal for request in made] == list(range(6))
    assert {segment.text[0] for segment in made[0].segments} == {"I", "|", "b"}


def test_what_is_asked_for_depends_on_seed_and_id_alone() -> None:
    alone = {request.request_id: request for request in requests({"a": stream(30, "a")})}
    limited = requests({"b": stream(30, "b"), "a": stream(30, "a")}, replace(ROLLING, limit=10))
    other_seed = requests({"a": stream(30, "a")}, replace(ROLLING, seed=1))

    shared = [request for request in limited if request.session == "a"]
    assert len(limited) == 10
    assert shared
    assert all(request.segments == alone[request.request_id].segments for request in shared)
    assert [request.expected for request in other_seed] != [request.expected for request in alone.values()]


def test_every_place_in_the_window_is_asked_for() -> None:
    made = requests({"a": stream(200)})

    places = [[segment.text for segment in request.segments].index(str(request.expected)[:-1]) // 2 for request in made]
    assert {place: places.count(place) > 40 for place in set(places)} == {1: True, 2: True, 3: True}


def test_documents_that_recur_are_one_segment() -> None:
    one, two = requests({"a": stream(5)})

    assert one.segments[4] is two.segments[2] is two.prelude[0][4]
    assert one.segments[1] is one.segments[3]


def test_without_separator_or_instruction_there_are_none() -> None:
    first = requests({"a": stream(4)}, replace(ROLLING, separator="", instruction=""))[0]
    assert [segment.kind for segment in first.segments] == ["document"] * 3 + ["query"]

    first = requests({"a": stream(4)}, replace(ROLLING, instruction=""))[0]
    assert [segment.text for segment in first.prelude[0]] == ["d1", "|", "d2", "|", "d3"]


def test_only_observations_with_one_answer_are_asked_for() -> None:
    same, none, fit = Event("x", "same?", "1", 0, None), Event("y", "y?", "", 0, None), Event("z", "z?", "2", 0, None)
    other = replace(same, document="w", answer="3")
    streams = {"a": [fit, same, other, none, fit] * 20}

    made = requests(streams, replace(ROLLING, window=5))

    assert {request.expected for request in made} == {"2"}
    with pytest.raises(TraceError, match="request 'a-0001': no observation of its window can be asked for"):
        requests({"a": [same, other, none, same]})


def test_streams_that_are_too_short_are_named() -> None:
    assert too_short({"a": stream(3), "b": stream(4)}, ROLLING) == ["a"]
    with pytest.raises(TraceError, match="a window of 3 with stride 1 needs 4 events, and the table has 3"):
        too_short({"a": stream(3)}, ROLLING)
    with pytest.raises(TraceError, match="a window of 3 with stride 2 needs 5 events, and the longest stream has 4"):
        too_short({"a": stream(3), "b": stream(4)}, replace(ROLLING, stride=2))


@pytest.mark.slow
def test_time_grows_with_the_requests_alone() -> None:
    def seconds(events: int) -> float:
        start = time.process_time()
        for _ in rolling_requests({"a": stream(events)}, Rolling()):
            pass
        return time.process_time() - start

    gc.disable()  # its time grows with all that the session has loaded
    try:
        assert seconds(8084) < 6 * seconds(2084)
    finally:
        gc.enable()
