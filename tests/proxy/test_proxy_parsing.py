"""What servers take for JSON is recorded, also where it is none."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.proxy.exchange import Exchange, api_of
from kvaudit.proxy.parsing import parsed_object

ODD = "the request is no proper JSON (NaN, a lone surrogate or the like), and was read leniently"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"x": NaN, "y": [-Infinity, Infinity]}', {"x": None, "y": [None, None]}),
        ('{"x": "a\\ud83d", "\\udc00": [["\\ud800"]]}', {"x": "a\ufffd", "\ufffd": [["\ufffd"]]}),
        ('{"x": NaN, "y": "\\ud83d\\ude00"}', {"x": None, "y": "\U0001f600"}),
        ('{"x": NaN, "y": 18446744073709551616, "z": 9}', {"x": None, "y": 2.0**64, "z": 9}),
        ('{"x": NaN, "y": %s}' % ("9" * 5000), {"x": None, "y": float("inf")}),
        ('{"x": "line\nfeed"}', None),
        ("[NaN]", None),
        ("NaN", None),
        ('{"x": NaN', None),
        ("[" * 5000, None),
    ],
)
def test_json_is_read_as_python_servers_read_it(text: str, value: object) -> None:
    found, proper = parsed_object(text.encode())

    assert (found, proper) == (value, False)
    assert orjson.dumps(found)


@given(st.dictionaries(st.text(max_size=5), st.integers(-5, 5) | st.text(max_size=5) | st.floats(allow_nan=False)))
def test_proper_json_is_read_as_it_is(value: dict[str, Any]) -> None:
    data = orjson.dumps(value)

    assert parsed_object(data) == (orjson.loads(data), True)


@pytest.mark.parametrize("raw", ['{"messages": [], "temperature": NaN}', '{"messages": [], "user": "\\ud83d"}'])
def test_requests_and_answers_that_are_no_proper_json_are_recorded(raw: str) -> None:
    api = api_of("POST", "/v1/chat/completions")
    assert api is not None
    exchange = Exchange(api, "/v1/chat/completions", [], b"", 10**6)
    exchange.add_request(raw.encode())
    exchange.begin_answer(200, [(b"content-type", b"text/event-stream")])
    exchange.add_answer(b'data: {"choices": [{"delta": {"content": "Hi\\ud83d"}, "logprob": -Infinity}]}\n\n', 1.0)
    exchange.end("complete")

    line = orjson.loads(exchange.line("r1-1"))

    assert line["request_raw"] == raw
    assert line["request"]["messages"] == []
    assert line["answer"]["choices"][0]["text"] == "Hi\ufffd"
    assert line["problems"] == [ODD]
    assert (exchange.request_unread, exchange.answer_unread) == (False, False)
