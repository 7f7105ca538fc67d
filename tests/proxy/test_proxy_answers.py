"""How answers are put together from what servers really send."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.proxy.answers import (
    UNSAYABLE,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    MessagesAnswer,
    ResponsesAnswer,
    error_in,
)
from kvaudit.proxy.streams import BodyDecoder, ServerSentEvents, TooLargeError, UnknownEncodingError

CUT_LINES = (
    b"\xef\xbb\xbfdata: one\r\n\r\n: note\n\ndata:two\ndata: more\n\nevent: x\rdata: three\r\rid: 4\n\ndata: [DONE]"
)


def split(chunks: list[bytes]) -> list[bytes]:
    events = ServerSentEvents()
    found = [data for chunk in chunks for data in events.feed(chunk)]
    return found + list(events.finish())


@given(st.lists(st.integers(0, len(CUT_LINES)), max_size=12))
def test_events_are_the_same_wherever_chunks_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CUT_LINES)]

    found = split([CUT_LINES[start:end] for start, end in pairwise(edges)])

    assert found == [b"one", b"two\nmore", b"three", b"[DONE]"]


def test_events_have_their_own_names() -> None:
    events = ServerSentEvents()
    chunk = b"event: x\n\ndata: 1\n\nevent:error\ndata: 2\n\ndata: 3\nevent: late\n\ndata: 4\n\n"

    assert [(events.name, data) for data in events.feed(chunk)] == [
        (b"", b"1"),
        (b"error", b"2"),
        (b"late", b"3"),
        (b"", b"4"),
    ]


def test_only_line_ends_end_lines() -> None:
    text = "a\u2028b\u2029c\u0085d\x0bf".encode()

    assert split([b"data: " + text + b"\n\n"]) == [text]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("", bytes),
        ("identity", bytes),
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("gzip", lambda data: gzip.compress(data[:3000]) + bytes(9000) + gzip.compress(data[3000:]) + bytes(3)),
        ("deflate", zlib.compress),
        ("deflate", lambda data: zlib.compress(data)[2:-4]),
        ("zstd", zstandard.ZstdCompressor().compress),
        ("zstd", lambda data: b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:9], data[9:]))),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10000])
def test_encodings_are_undone_chunk_by_chunk(encoding: str, encode: Any, size: int) -> None:
    plain = b"data: something\n\n" * 500
    sent = encode(plain)
    decoder = BodyDecoder(encoding, len(plain))

    assert b"".join(p for i in range(0, len(sent), size) for p in decoder.feed(sent[i : i + size])) == plain


def test_what_follows_a_member_and_is_none_is_an_error() -> None:
    with pytest.raises(zlib.error):
        BodyDecoder("gzip", 1000).whole(gzip.compress(b"{}") + b"garbage")


def test_a_body_that_grows_beyond_the_limit_is_given_up() -> None:
    with pytest.raises(TooLargeError):
        BodyDecoder("gzip", 1000).whole(gzip.compress(bytes(10**7)))


@pytest.mark.parametrize("encoding", ["compress", "gzip, br", "nonsense"])
def test_an_encoding_that_is_not_known_is_told(encoding: str) -> None:
    with pytest.raises(UnknownEncodingError):
        BodyDecoder(encoding, 10)


def delta(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "model": "m", "choices": [{"index": 0, "delta": fields}]}


def piece(arguments: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {key: fields.pop(key) for key in ("name",) if key in fields}
    return {**fields, "function": function | ({} if arguments is None else {"arguments": arguments})}


def assembled(answer: Answer, *events: dict[str, Any]) -> dict[str, Any]:
    for event in events:
        answer.add_event(event)
    return answer.as_json()["choices"][0]  # type: ignore[index]


WEATHER = {"id": "w", "name": "weather", "arguments": '{"in": "Bonn"}'}
TIME = {"id": "t", "name": "time", "arguments": "{}"}


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(
            [
                piece("", index=0, id="w", name="weather"),
                piece('{"in": ', index=0),
                piece('"Bonn"}', index=0),
                piece("{}", index=1, id="t", name="time"),
            ],
            id="as the API says",
        ),
        pytest.param(
            [
                piece('{"in": ', id="w", name="weather"),
                piece('"Bonn"}', id="w"),
                piece("{}", id="t", name="time"),
            ],
            id="without index",
        ),
        pytest.param(
            [
                piece('{"in": ', index=None, id="w", name="weather"),
                piece('"Bonn"}', index=None, id=None, name=None),
                piece("{}", index=None, id="t", name="time"),
            ],
            id="null index, id once",
        ),
        pytest.param(
            [piece('{"in": "Bonn"}', index=0, id="w", name="weather"), piece("{}", index=0, id="t", name="time")],
            id="every index 0",
        ),
        pytest.param(
            [
                piece('{"in": ', index=0, id="w", name="weather"),
                piece("{", index=1, id="t", name="time"),
                piece('"Bonn"}', index=0, id="other"),
                piece("}", index=1, name=""),
            ],
            id="interleaved, ids that change",
        ),
        pytest.param(
            [
                piece('{"in": ', index=0, id="w", name="weather"),
                piece('"Bonn"}', index=0, id="w", name="weather"),
                piece("{}", index=1, id="t", name="time"),
            ],
            id="name and id in every piece",
        ),
    ],
)
def test_tool_calls_are_put_together(pieces: list[dict[str, Any]]) -> None:
    choice = assembled(ChatAnswer(), *(delta(tool_calls=[part]) for part in pieces))

    assert choice["tool_calls"] == [WEATHER, TIME]


def test_tool_calls_without_index_and_id_are_told_apart_by_their_names() -> None:
    parts = [piece("{", name="a"), piece("}"), piece("{}", name="b"), piece("{}", name="b")]

    choice = assembled(ChatAnswer(), *(delta(tool_calls=[part]) for part in parts))

    assert [(call["name"], call["arguments"]) for call in choice["tool_calls"]] == [
        ("a", "{}"),
        ("b", "{}"),
        ("b", "{}"),
    ]


def test_a_tool_call_whose_arguments_are_an_object_and_an_old_function_call_are_taken() -> None:
    one = assembled(ChatAnswer(), delta(tool_calls=[{"function": {"name": "f", "arguments": {"x": 1}}}]))
    old = assembled(ChatAnswer(), delta(function_call={"name": "f"}), delta(function_call={"arguments": '{"x":1}'}))

    assert one["tool_calls"] == old["tool_calls"] == [{"id": None, "name": "f", "arguments": '{"x":1}'}]


def test_a_chat_stream_with_all_its_oddities() -> None:
    answer = ChatAnswer()
    content = [
        answer.add_event(event)
        for event in (
            {"id": "c", "model": "m"},
            {"id": "c", "choices": None, "usage": None},
            delta(role="assistant", content=""),
            delta(content=None, reasoning_content="Hm."),
            delta(content="Hel"),
            {"choices": [{"index": 1, "delta": {"content": "Other"}}, {"delta": {"content": [{"text": "lo"}]}}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
            {"usage": {"prompt_tokens_details": {"cached_tokens": 4}}},
        )
    ]

    assert content == [False, False, False, True, True, True, False, False, False]
    assert answer.finished
    assert answer.counts() == {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4}
    first, second = answer.as_json()["choices"]  # type: ignore[misc]
    assert (first["text"], first["reasoning"], first["finish_reason"]) == ("Hello", "Hm.", "stop")
    assert second["text"] == "Other"


@pytest.mark.parametrize(
    ("answer", "usage", "counts"),
    [
        (ChatAnswer(), {"prompt_tokens": 5, "prompt_tokens_details": None}, (5, None, None)),
        (ChatAnswer(), {"prompt_tokens": 5, "prompt_cache_hit_tokens": 3}, (5, None, 3)),
        (ChatAnswer(), {"prompt_tokens": "5", "completion_tokens": True}, (None, None, None)),
        (ResponsesAnswer(), {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}, (9, None, 0)),
        (
            MessagesAnswer(),
            {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 4, "output_tokens": 8},
            (7, 8, 2),
        ),
    ],
)
def test_tokens_are_counted_the_same_for_every_api(
    answer: Answer, usage: dict[str, Any], counts: tuple[int | None, ...]
) -> None:
    answer.set_whole({"usage": usage})

    told = answer.counts()
    assert (told["prompt_tokens"], told["completion_tokens"], told["cached_tokens"]) == counts


def test_responses_that_break_off_keep_what_came() -> None:
    choice = assembled(
        answer := ResponsesAnswer(),
        {"type": "response.created", "response": {"id": "r", "status": "in_progress", "output": []}},
        {"type": "response.reasoning_summary_text.delta", "delta": "Hm."},
        {"type": "response.output_item.added", "output_index": 1, "item": {"type": "message"}},
        {"type": "response.output_text.delta", "delta": "Hel"},
        {
            "type": "response.output_item.added",
            "output_index": 2,
            "item": {"type": "function_call", "id": "i", "call_id": "w", "name": "weather", "arguments": ""},
        },
        {
            "type": "response.function_call_arguments.delta",
            "output_index": 2,
            "item_id": "i",
            "delta": '{"in": "Bonn"}',
        },
    )

    assert (choice["text"], choice["reasoning"], choice["tool_calls"]) == ("Hel", "Hm.", [WEATHER])
    assert (answer.response_id, answer.finished, choice["finish_reason"]) == ("r", False, None)


def test_the_last_event_of_a_response_has_the_last_word() -> None:
    call = {"type": "function_call", "call_id": "t", "name": "time", "arguments": "{}"}
    part = {"type": "output_text", "text": "Hello"}
    response = {"id": "r", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    answer = ResponsesAnswer()

    choice = assembled(
        answer,
        {"type": "response.output_text.delta", "delta": "Hel"},
        {
            "type": "response.incomplete",
            "response": response | {"output": [{"type": "message", "content": [part]}, call]},
        },
    )

    assert (choice["text"], choice["tool_calls"], choice["finish_reason"]) == ("Hello", [TIME], "max_output_tokens")
    assert answer.finished


def test_a_response_that_failed_says_why() -> None:
    answer = ResponsesAnswer()

    answer.add_event({"type": "response.failed", "response": {"status": "failed", "error": {"message": "no memory"}}})

    assert answer.error == "no memory"


def test_anthropic_blocks_are_put_together() -> None:
    answer = MessagesAnswer()
    events: list[dict[str, Any]] = [
        {
            "type": "message_start",
            "message": {"id": "a", "model": "m", "usage": {"input_tokens": 3, "output_tokens": 1}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "H"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "i"}},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "w", "name": "weather", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"in": '}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '"Bonn"}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]

    choice = assembled(answer, *events)

    assert choice == {"text": "Hi", "reasoning": "Hm.", "tool_calls": [WEATHER], "finish_reason": "tool_use"}
    assert answer.counts() == {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "cached_tokens": None,
        "cache_written_tokens": None,
    }
    assert answer.finished


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "too long"}, "too long"),
        ({"object": "error", "message": "too long"}, "too long"),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "too long"}}, "too long"),
        ({"success": False}, '{"success":false}'),
        ({"error": {"code": 5}}, '{"code":5}'),
        ({"error": None, "success": True}, None),
        ({"choices": []}, None),
    ],
)
def test_an_error_is_seen_whatever_its_form(body: dict[str, Any], error: str | None) -> None:
    assert error_in(body) == error


def test_what_is_nested_too_deep_is_told_so() -> None:
    deep = orjson.loads(b'{"a":' * 600 + b"1" + b"}" * 600)
    assert error_in({"error": {"code": deep}}) == UNSAYABLE
    answer = MessagesAnswer()
    answer.set_whole({"content": [{"type": "tool_use", "id": "t", "name": "look", "input": deep}]})
    assert UNSAYABLE in str(answer.as_json())


FIELDS = [
    *("choices", "delta", "message", "content", "tool_calls", "function", "index", "id", "name", "arguments", "usage"),
    *("type", "response", "output", "item", "output_index", "content_block", "partial_json", "error", "text", "input"),
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=12,
)
KINDS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "response.output_item.added",
    "response.completed",
]


@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5), max_size=4), st.sampled_from(KINDS))
def test_no_event_is_too_odd(events: list[dict[str, Any]], kind: str) -> None:
    for answer in (ChatAnswer(), CompletionAnswer(), ResponsesAnswer(), MessagesAnswer()):
        for event in events:
            answer.add_event({"type": kind} | event)
            answer.set_whole(event)
        answer.as_json()
        answer.counts()
