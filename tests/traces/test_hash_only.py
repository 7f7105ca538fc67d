"""Traces of lengths and hashes: what of them is read, left out and said."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.records import HashedRequest
from kvaudit.traces import read_trace
from kvaudit.traces.hash_only import MOONCAKE, WEKA, HashedTrace, HashesOnlyError
from kvaudit.traces.streaming import StreamedTrace, open_trace


def mooncake(tokens: object, ids: object, **fields: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 5, "hash_ids": ids, **fields}


def weka(*requests: object, **fields: object) -> dict[str, object]:
    return {"id": "s", "models": ["m"], "block_size": 4, "requests": list(requests), **fields}


def turn(time: object, tokens: object, *ids: object, **fields: object) -> dict[str, object]:
    return {"t": time, "type": "s", "in": tokens, "out": 2, "hash_ids": list(ids), **fields}


def lines(path: Path, *records: object) -> Path:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def opened(path: Path, name: str | None = None) -> tuple[list[HashedRequest], HashedTrace]:
    with open_trace(path, name) as trace:
        assert isinstance(trace, HashedTrace)
        return list(trace.requests), trace


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_a_mooncake_line_is_a_request_of_blocks_of_512_tokens(file: Path) -> None:
    file.write_text(MOONCAKE)
    (request,), trace = opened(file)

    assert (trace.name, trace.block_tokens, trace.is_stated) == ("Mooncake", 512, False)
    assert request == HashedRequest("line-1", 0, 600, (0, 1), answer_tokens=9, timestamp=0.0, line=1)


def test_mooncakes_times_are_milliseconds_and_sessions_are_taken_where_there_are_some(file: Path) -> None:
    requests, trace = opened(lines(file, mooncake(9, ["a"], timestamp=1500, session_id="x"), mooncake(9, [])))

    assert [(r.timestamp, r.session, r.block_ids) for r in requests] == [(1.5, "x", ("a",)), (0.0, None, ())]
    assert trace.notes == ["1 requests have earlier times than one before them: they stay in the order of the file"]


def test_a_weka_session_has_its_own_block_size(file: Path) -> None:
    file.write_text(WEKA)
    (request,), trace = opened(file)

    assert (trace.name, trace.block_tokens, trace.is_stated, trace.notes) == ("WEKA", 64, True, [])
    assert request == HashedRequest(
        "s:1", 0, 600, (1, 2), namespace="1", session="s", answer_tokens=9, timestamp=0.0, line=1
    )


def test_ids_of_sessions_are_namespaces_of_their_own_unless_they_are_global(file: Path) -> None:
    def spaces(*scope: dict[str, object]) -> list[str]:
        requests, _ = opened(lines(file, *(weka(turn(0, 9, 1), **fields) for fields in scope)))
        return [request.namespace for request in requests]

    local, world = {"hash_id_scope": "local"}, {"hash_id_scope": "global"}
    assert spaces({}, {}) == spaces(local, local) == ["1", "2"]
    assert spaces(world, world) == ["", ""]


def test_a_sub_agent_is_a_session_in_the_namespace_of_its_session_and_in_its_place_in_time(file: Path) -> None:
    def agent(*times: float) -> dict[str, object]:
        return {"t": 5, "type": "subagent", "agent_id": "ab", "requests": [turn(time, 9, 1) for time in times]}

    for times in ((0, 7), (5, 12)):  # since the sub-agent began, and since the session began
        file.write_bytes(orjson.dumps(weka(turn(0, 9, 1), agent(*times), turn(6, 13, 1)), option=orjson.OPT_INDENT_2))
        requests, _ = opened(file)
        assert [(r.request_id, r.session, r.timestamp) for r in requests] == [
            ("s:1", "s", 0),
            ("s/ab:1", "s/ab", 5),
            ("s:3", "s", 6),
            ("s/ab:2", "s/ab", 12),
        ]
        assert {request.namespace for request in requests} == {"1"}
        assert [request.ordinal for request in requests] == [0, 1, 2, 3]


def test_sessions_are_one_a_line_too_and_have_no_common_clock(file: Path) -> None:
    requests, trace = opened(lines(file, weka(turn(7, 9, 1), id="a"), weka(turn(0, 9, 1), id="b")))

    assert [request.request_id for request in requests] == ["a:1", "b:1"]
    assert trace.notes == ["2 sessions have no common clock: they are served one after another"]


def test_without_all_times_a_session_stays_in_the_order_of_the_file(file: Path) -> None:
    requests, _ = opened(lines(file, weka(turn(7, 9, 1), turn(None, 9, 1), turn(1, 9, 1))))

    assert [request.timestamp for request in requests] == [7, None, 1]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (mooncake(None, [1]), "has no 'input_length'"),
        (mooncake(0, [1]), "has a 'input_length' that is not a whole number from 1 on"),
        (mooncake("9", [1]), "has a 'input_length' that is not a whole number from 1 on"),
        (mooncake(2**40, [1]), "has an 'input_length' or 'output_length' that is no length of a text"),
        (mooncake(9, [1], output_length=1e300), "has an 'input_length' or 'output_length' that is no length of a text"),
        (mooncake(9, None), "has no 'hash_ids'"),
        (mooncake(9, "1"), "has a 'hash_ids' that is not a list"),
        (mooncake(9, [1, True]), "has 'hash_ids' that are neither whole numbers nor texts"),
        (mooncake(9, [1], timestamp="now"), "has a 'timestamp' that is not a number"),
    ],
)
def test_what_is_no_request_is_left_out_with_its_line(file: Path, record: object, reason: str) -> None:
    requests, trace = opened(lines(file, mooncake(9, [1]), record, mooncake(9, [2])))

    assert [request.request_id for request in requests] == ["line-1", "line-3"]
    assert [request.ordinal for request in requests] == [0, 1]
    assert trace.tally.rows() == [{"reason": reason, "count": 1, "places": ["line 2"]}]


def test_of_weka_the_request_is_named_and_sessions_with_other_blocks_are_left_out(file: Path) -> None:
    path = lines(file, weka({"t": 1, "in": 9}, turn(0, 9, 1)), weka(turn(0, 9, 1), block_size=8), weka(block_size=None))
    requests, trace = opened(path)

    assert [request.request_id for request in requests] == ["s:2"]
    assert {row["reason"]: row["places"] for row in trace.tally.rows()} == {
        "has no 'hash_ids'": ["line 1 (s:1)"],
        "the session has blocks of 8 tokens, and the first one of 4": ["line 2"],
        "the session has no 'block_size'": ["line 3"],
    }


def test_a_trace_without_a_sound_request_is_one_error(file: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no request with its hashes: 2 has no 'input_length': line 1, line 2"):
        opened(lines(file, mooncake(None, [1]), mooncake(None, [1])))


def test_a_broken_line_is_left_out_and_more_of_them_than_sound_ones_are_an_error(file: Path) -> None:
    lines(file, mooncake(9, [1]), mooncake(9, [2]))
    file.write_bytes(b"{broken\n" + file.read_bytes())
    requests, trace = opened(file)

    assert [request.request_id for request in requests] == ["line-2", "line-3"]
    assert [(row["reason"], row["count"], row["places"][0][:6]) for row in trace.tally.rows()] == [
        ("broken JSON", 1, "line 1")
    ]

    file.write_bytes(file.read_bytes() + b"{broken\n" * 2)
    with pytest.raises(TraceError, match=r"line 1: broken JSON .* \(3 of 5 lines cannot be read\)"):
        opened(file)


def test_parquet_holds_mooncakes_rows_too(file: Path) -> None:
    pq.write_table(pa.Table.from_pylist([mooncake(600, [0, 1]), mooncake(700, [0, 2])]), file)
    requests, _ = opened(file)

    assert [(request.request_id, request.block_ids) for request in requests] == [("row-1", (0, 1)), ("row-2", (0, 2))]


def test_where_prompts_are_wanted_hashes_are_refused_and_inspect_is_named(file: Path) -> None:
    file.write_text(MOONCAKE)
    with pytest.raises(HashesOnlyError) as caught:
        read_trace(file)

    assert "kvaudit inspect" in str(caught.value.hint)


def test_a_trace_with_prompts_is_opened_with_its_header(file: Path) -> None:
    lines(file, {"messages": [{"role": "user", "content": "Hi"}]}, {"messages": []})
    with open_trace(file) as trace:
        assert isinstance(trace, StreamedTrace)
        assert len(list(trace.requests)) == 1
        assert trace.header["left_out"] == [
            {"reason": "has no messages", "count": 1, "places": ["line 2 (the request)"]}
        ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    ["hash_ids", "input_length", "output_length", "timestamp", "in", "out", "t", "requests", "block_size", "id"]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.booleans(), st.lists(st.tuples(NAMES, JSON), max_size=4), st.lists(st.tuples(NAMES, JSON), max_size=4))
def test_no_value_crashes_the_reader(
    file: Path, is_weka: bool, outer: list[tuple[str, object]], inner: list[tuple[str, object]]
) -> None:
    if is_weka:
        record = {**weka({**turn(0, 9, 1, 2), **dict(inner)}, turn(1, 9, 1)), **dict(outer)}
    else:
        record = {**mooncake(600, [1, 2]), **dict(outer)}
    try:
        requests, _ = opened(lines(file, record, mooncake(9, [1])), "weka" if is_weka else "mooncake")
    except (TraceError, AssertionError):
        return
    for request in requests:
        assert 0 < request.prompt_tokens < 2**31
        assert 0 <= request.answer_tokens < 2**31
        assert request.timestamp is None or math.isfinite(request.timestamp)
