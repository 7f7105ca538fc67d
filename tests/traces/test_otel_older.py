"""OpenTelemetry spans of older instrumentation: one attribute for each field of each message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.traces import read_trace
from kvaudit.traces.otel_older import older_messages, older_tools


def prompt(*messages: dict[str, Any]) -> dict[str, Any]:
    return {f"gen_ai.prompt.{n}.{name}": value for n, message in enumerate(messages) for name, value in message.items()}


def texts(path: Path, attributes: dict[str, Any]) -> list[tuple[str | None, str]]:
    path.write_bytes(orjson.dumps({"name": "chat", "context": {"span_id": "s"}, "attributes": attributes}))
    (request,) = read_trace(path).requests
    return [(segment.role, segment.text) for segment in request.segments]


def test_messages_are_read_in_the_order_of_their_numbers_not_of_the_attributes(tmp_path: Path) -> None:
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"turn {n}"} for n in range(11)]
    attributes = dict(reversed(prompt(*messages).items()))

    assert texts(tmp_path / "span", attributes) == [(m["role"], m["content"]) for m in messages]


def test_parts_calls_and_tools_are_read_as_in_newer_spans(tmp_path: Path) -> None:
    attributes = {
        **prompt(
            {"role": "user", "content": '[{"type": "text", "text": "Read "}, {"type": "text", "text": "it."}]'},
            {
                "role": "assistant",
                "tool_calls.0.id": "x",
                "tool_calls.0.name": "read",
                "tool_calls.0.arguments": "{}",
                "tool_calls.1.name": "list",
            },
            {"role": "tool", "tool_call_id": "x", "content": "[1, 2]"},
        ),
        "llm.request.functions.0.name": "read",
        "llm.request.functions.0.parameters": '{"type": "object"}',
    }

    assert texts(tmp_path / "span", attributes) == [
        ("system", '[{"name":"read","parameters":{"type":"object"}}]'),
        ("user", "Read it."),
        ("assistant", '{"name":"read","arguments":{}}\n{"name":"list","arguments":{}}'),
        ("tool", "[1, 2]"),
    ]


def test_a_prompt_of_which_a_message_is_missing_is_left_out(tmp_path: Path) -> None:
    attributes = prompt({"role": "user", "content": "a"}, {"role": "user"}, {"role": "user", "content": "c"})
    del attributes["gen_ai.prompt.1.role"]

    with pytest.raises(TraceError, match=r"has no 'gen_ai.prompt.1', which stands before others that it has: line 1"):
        texts(tmp_path / "span", attributes)


def test_embeddings_are_told_by_the_older_name_of_the_operation(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is an embedding request"):
        texts(tmp_path / "span", {**prompt({"role": "user", "content": "a"}), "llm.request.type": "embedding"})


def test_the_logged_length_of_the_answer_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "span"
    texts(path, {**prompt({"role": "user", "content": "a"}), "gen_ai.usage.completion_tokens": 7})

    assert read_trace(path).requests[0].max_tokens == 7


NAMES = st.from_regex(r"(gen_ai\.prompt|llm\.request\.functions)\.[0-3]\.(role|content|name|tool_calls\.[01]\.name)")


@given(st.dictionaries(NAMES, st.none() | st.text(max_size=4) | st.integers() | st.just('[{"type":"text"}]')))
def test_no_attributes_crash_it(attributes: dict[str, Any]) -> None:
    older_tools(attributes)
    try:
        messages = older_messages(attributes)
    except TraceError:
        return
    assert all("role" in message for message in messages)
