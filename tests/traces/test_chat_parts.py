"""Logs whose readers keep the parts of contents: the same messages, in more segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from foreign_examples import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.records import Segment, messages_of
from kvaudit.traces import read_source
from kvaudit.traces.chats import chat_segments
from kvaudit.traces.segments import SegmentPool
from kvaudit.traces.source import TraceSource, open_source

CALL = {"function": {"name": "f", "arguments": "{}"}}
CALLED = '{"name":"f","arguments":{}}'


def read(messages: list[Any], tools: Any = None, *, keeps_parts: bool = True) -> tuple[Segment, ...]:
    return chat_segments(TraceSource("log", Path("log"), keeps_parts), 1, messages, SegmentPool(), tools)


def told(messages: list[Any], tools: Any = None) -> list[tuple[str, str | None, str]]:
    return [(part.kind, part.role, part.text) for part in read(messages, tools)]


def test_every_part_is_a_segment_and_the_first_has_the_role() -> None:
    parts = [
        "Read:",
        {"type": "text", "text": "one"},
        {"type": "text", "text": ""},
        " ",
        {"type": "text", "text": "two"},
    ]

    assert told([{"role": "user", "content": parts}, {"role": "assistant", "content": "Done"}]) == [
        ("query", "user", "Read:"),
        ("query", None, "one"),
        ("separator", None, " "),
        ("query", None, "two"),
        ("message", "assistant", "Done"),
    ]


def test_calls_are_parts_with_line_ends_between_them() -> None:
    assert told([{"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}]) == [
        ("message", "assistant", CALLED),
        ("separator", None, "\n"),
        ("message", None, CALLED),
    ]


@pytest.mark.parametrize("content", [None, "", [], [""]])
def test_a_message_without_text_is_one_empty_segment(content: object) -> None:
    assert told([{"role": "assistant", "content": content}]) == [("message", "assistant", "")]


def test_definitions_of_tools_are_a_message_behind_the_first_system_messages() -> None:
    system = [{"role": "system", "content": ["Help. ", "Be brief."]}, {"role": "user", "content": "Hi"}]

    assert [(role, text) for _, role, text in told(system, [{"name": "f"}])] == [
        ("system", "Help. "),
        (None, "Be brief."),
        ("system", '[{"name":"f"}]'),
        ("user", "Hi"),
    ]


PARTS = st.lists(st.sampled_from(["a", "", "\n", "b c", {"type": "text", "text": "d"}]), max_size=4)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": PARTS | st.none()},
        optional={"tool_calls": st.lists(st.just(CALL), max_size=2)},
    ),
    min_size=1,
    max_size=5,
)


@given(MESSAGES, st.none() | st.just([{"name": "f"}]))
def test_parts_are_the_message_that_is_read_otherwise(messages: list[Any], tools: Any) -> None:
    whole = read(messages, tools, keeps_parts=False)

    assert messages_of(read(messages, tools)) == [(part.role, part.text) for part in whole]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _ in EXAMPLES])
def test_every_format_holds_the_same_messages_in_parts(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(text)
    with open_source(file) as source:
        whole, parts = read_source(source, name), read_source(replace(source, keeps_parts=True), name)

    assert len(whole.requests) == len(parts.requests)
    for one, other in zip(whole.requests, parts.requests, strict=True):
        if one.chat:
            assert messages_of(one.segments) == messages_of(other.segments)
        else:
            assert one == other


def test_results_of_anthropic_tools_keep_their_blocks(tmp_path: Path) -> None:
    blocks = [{"type": "text", "text": text} for text in ("first", "second")]
    result = {"type": "tool_result", "tool_use_id": "c", "content": blocks}
    messages = [{"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    file = tmp_path / "log"
    file.write_bytes(orjson.dumps({"model": "m", "max_tokens": 1, "system": "Help.", "messages": messages}))

    with open_source(file) as source:
        (request,) = read_source(replace(source, keeps_parts=True)).requests

    assert [(part.kind, part.role, part.text) for part in request.segments] == [
        ("instruction", "system", "Help."),
        ("tool-result", "tool", "first"),
        ("tool-result", None, "second"),
        ("query", "user", "So?"),
    ]
