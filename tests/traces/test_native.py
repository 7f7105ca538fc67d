"""kvaudit's own traces, as they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvaudit.errors import TraceError
from kvaudit.records import Request, Segment, Trace
from kvaudit.traces import read_trace
from kvaudit.traces.segments import TraceDigest, make_segment

INSTRUCTION = make_segment("instruction", "date,close\n")
DOCUMENT = make_segment("document", "2013-01-02,549.03\n")
QUERY = make_segment("query", "\n2013-01-02,", token_ids=(1, 2, 3))
MESSAGE = {"kind": "message", "role": "user", "text": "Hello"}
HEADER = {"kvaudit_trace": 1, "made_by": "test"}


def defined(content: Segment, /, **changes: object) -> dict[str, Any]:
    line = {"segment": content.content_id, "kind": content.kind, "text": content.text}
    if content.token_ids is not None:
        line["token_ids"] = list(content.token_ids)
    return line | changes


def asked(request_id: object = "r1", *segments: Segment, **changes: object) -> dict[str, Any]:
    return {"request": request_id, "segments": [s.content_id for s in segments or (DOCUMENT,)], **changes}


SOUND = [HEADER, defined(INSTRUCTION), defined(DOCUMENT), defined(QUERY), asked("r1", INSTRUCTION, DOCUMENT, QUERY)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def read(file: Path, *lines: object) -> Trace:
    file.write_bytes(b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines))
    return read_trace(file)


def refusal(file: Path, *lines: object) -> str:
    with pytest.raises(TraceError) as caught:
        read(file, *lines)
    return str(caught.value)


def test_reads_every_field(file: Path) -> None:
    request = asked(
        "r1",
        INSTRUCTION,
        DOCUMENT,
        QUERY,
        prelude=[[INSTRUCTION.content_id], [DOCUMENT.content_id]],
        session="s",
        max_tokens=7,
        stop=["\n", ","],
        expected="549.03",
        timestamp=12,
    )

    trace = read(file, *SOUND[:4], request)

    assert trace.header == HEADER
    assert trace.source == str(file)
    assert trace.requests == (
        Request(
            request_id="r1",
            ordinal=0,
            segments=(INSTRUCTION, DOCUMENT, QUERY),
            prelude=((INSTRUCTION,), (DOCUMENT,)),
            session="s",
            max_tokens=7,
            stop=("\n", ","),
            expected="549.03",
            timestamp=12.0,
            line=5,
        ),
    )


def test_reads_requests_written_by_hand(file: Path) -> None:
    by_hand = {"request": "r1", "segments": [{"kind": "document", "text": DOCUMENT.text}]}
    chat = {"request": "r2", "segments": [{"kind": "query", "role": "user", "text": "Hello"}], "chat": True}

    trace = read(file, by_hand, chat)

    assert trace.header == {}
    assert trace.requests[0].segments == (DOCUMENT,)
    assert trace.requests[0].max_tokens == 16
    assert trace.requests[1].chat
    assert trace.requests[1].segments[0].role == "user"


def test_a_segment_that_recurs_is_one_object(file: Path) -> None:
    inline = {"kind": "document", "text": DOCUMENT.text}

    trace = read(file, *SOUND, asked("r2"), {"request": "r3", "segments": [inline], "prelude": [[inline]]})

    one, two, three = trace.requests
    assert one.segments[1] is two.segments[0] is three.segments[0] is three.prelude[0][0]


def test_token_ids_may_stand_without_text(file: Path) -> None:
    trace = read(file, {"request": "r1", "segments": [{"kind": "document", "token_ids": [0, 5]}]})

    assert trace.requests[0].segments[0].token_ids == (0, 5)


def test_empty_messages_of_a_chat_are_kept(file: Path) -> None:
    trace = read(
        file, {"request": "r1", "chat": True, "segments": [{"kind": "message", "role": "assistant", "text": ""}]}
    )

    assert trace.requests[0].segments[0].text == ""


@pytest.mark.parametrize(
    ("lines", "line", "what"),
    [
        ([HEADER], None, "holds no requests"),
        ([{**HEADER, "kvaudit_trace": 2}, *SOUND[1:]], 1, "this kvaudit reads up to 1 (upgrade kvaudit)"),
        ([{**HEADER, "kvaudit_trace": "1"}, *SOUND[1:]], 1, "'kvaudit_trace' is not a version number"),
        ([*SOUND, HEADER], 6, "a second header"),
        ([*SOUND, {"other": 1}], 6, "neither a segment nor a request"),
        ([*SOUND, asked("r1")], 6, "request 'r1' has the id of line 5"),
        ([*SOUND, asked("")], 6, "has a 'request' that is not a string with something in it"),
        ([*SOUND, asked(None)], 6, "request None has no id"),
        ([*SOUND, asked(["r2"])], 6, "request ['r2'] has a 'request' that is not a string"),
        ([*SOUND, asked("r2", text="x")], 6, "request 'r2' has an unknown field 'text' (known: request, segments"),
        ([*SOUND, {"request": "r2"}], 6, "request 'r2' has no segments"),
        ([*SOUND, {"request": "r2", "segments": []}], 6, "request 'r2' has no segments"),
        ([*SOUND, {"request": "r2", "segments": "abc"}], 6, "has a 'segments' that is not a list"),
        ([*SOUND, {"request": "r2", "segments": [1]}], 6, "neither a content id nor an object"),
        ([*SOUND, {"request": "r2", "segments": [[]]}], 6, "neither a content id nor an object"),
        ([*SOUND, {"request": "r2", "segments": ["abc"]}], 6, "refers to the segment 'abc', which no line before"),
        ([*SOUND, asked("r2", prelude=["abc"])], 6, "has a 'prelude' that is not a list of lists"),
        ([*SOUND, asked("r2", prelude={"a": 1})], 6, "has a 'prelude' that is not a list"),
        ([*SOUND, asked("r2", prelude=[[]])], 6, "request 'r2' has nothing in prelude 1"),
        ([*SOUND, asked("r2", max_tokens=0)], 6, "has a 'max_tokens' that is not a whole number from 1 on"),
        ([*SOUND, asked("r2", max_tokens=1.5)], 6, "has a 'max_tokens' that is not a whole number from 1 on"),
        ([*SOUND, asked("r2", max_tokens=True)], 6, "has a 'max_tokens' that is not a whole number from 1 on"),
        ([*SOUND, asked("r2", stop=["a", ""])], 6, "has a 'stop' that is not a list of strings"),
        ([*SOUND, asked("r2", stop=[1])], 6, "has a 'stop' that is not a list of strings"),
        ([*SOUND, asked("r2", session={})], 6, "has a 'session' that is not a string"),
        ([*SOUND, asked("r2", expected=549.03)], 6, "has a 'expected' that is not a string"),
        ([*SOUND, asked("r2", timestamp="now")], 6, "has a 'timestamp' that is not a number"),
        ([*SOUND, asked("r2", chat="yes")], 6, "has a 'chat' that is not true or false"),
        ([*SOUND, asked("r2", chat=True)], 6, "segment 1 has no role, so that it belongs to no message"),
        (
            [*SOUND, {"request": "r2", "chat": True, "segments": [{**MESSAGE, "token_ids": [1]}]}],
            6,
            "segment 1 has token ids in place of a text",
        ),
        (
            [*SOUND, {"request": "r2", "chat": True, "segments": [MESSAGE, {**MESSAGE, "role": None, "text": ""}]}],
            6,
            "has no text in segment 2 (message)",
        ),
        ([*SOUND, defined(DOCUMENT, text="changed")], 6, "the trace was changed or damaged"),
        ([*SOUND, defined(DOCUMENT, segment=5)], 6, "segment 5 has the content of"),
        ([*SOUND, defined(DOCUMENT, kind="thing")], 6, "has the kind 'thing' (kinds: instruction, document"),
        ([*SOUND, defined(DOCUMENT, kind=None)], 6, "has the kind None"),
        ([*SOUND, defined(DOCUMENT, text=None)], 6, "has no 'text'"),
        ([*SOUND, defined(DOCUMENT, text=5)], 6, "has a 'text' that is not a string"),
        ([*SOUND, defined(DOCUMENT, token_ids="12")], 6, "has a 'token_ids' that is not a list"),
        ([*SOUND, defined(DOCUMENT, token_ids=[-1])], 6, "has 'token_ids' that are not whole numbers from 0 on"),
        ([*SOUND, defined(DOCUMENT, token_ids=[2**31])], 6, "has 'token_ids' that are not whole numbers from 0 on"),
        ([*SOUND, defined(DOCUMENT, token_ids=[True])], 6, "has 'token_ids' that are not whole numbers from 0 on"),
        ([*SOUND, defined(DOCUMENT, extra=1)], 6, "has an unknown field 'extra'"),
        (
            [*SOUND, {"request": "r2", "segments": [{"kind": "document", "text": ""}]}],
            6,
            "request 'r2' has no text in segment 1 (document)",
        ),
        (
            [*SOUND, {"request": "r2", "segments": [{"kind": "document", "text": "", "token_ids": []}]}],
            6,
            "request 'r2' has no text in segment 1 (document)",
        ),
        (
            [*SOUND, asked("r2", prelude=[[DOCUMENT.content_id, {"kind": "query", "text": ""}]])],
            6,
            "request 'r2' has no text in prelude 1, segment 2 (query)",
        ),
        (
            [*SOUND, {"request": "r2", "segments": [{"kind": "document", "text": "a", "id": 1}]}],
            6,
            "a segment has an unknown field 'id'",
        ),
    ],
)
def test_bad_lines_are_named(file: Path, lines: list[object], line: int | None, what: str) -> None:
    message = refusal(file, *lines)

    assert message.startswith(f"{file} " if line is None else f"{file}, line {line}: ")
    assert what in message


def test_contents_that_share_an_id_are_never_taken_for_one_another(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.traces.segments._ID_DIGITS", 1)
    documents = [make_segment("document", str(n)) for n in range(17)]

    assert "shares its id with another content" in refusal(file, *map(defined, documents), asked("r1", documents[0]))


def test_the_digest_is_of_the_content_alone(file: Path) -> None:
    digest = read(file, *SOUND).digest
    inline = [
        {"kind": "instruction", "text": INSTRUCTION.text},
        {"text": DOCUMENT.text, "kind": "document"},
        {"kind": "query", "text": QUERY.text, "token_ids": [1, 2, 3]},
    ]

    spaced = json.dumps({"max_tokens": 16, "segments": inline, "request": "r1"}, separators=(" ,  ", " :\t"))
    file.write_text(spaced, "utf-8")

    assert read_trace(file).digest == digest


@pytest.mark.parametrize(
    "request_line",
    [
        asked("r2", INSTRUCTION, DOCUMENT, QUERY),
        asked("r1", DOCUMENT, INSTRUCTION, QUERY),
        asked("r1", INSTRUCTION, DOCUMENT),
        asked("r1", INSTRUCTION, DOCUMENT, QUERY, max_tokens=15),
        asked("r1", INSTRUCTION, DOCUMENT, QUERY, stop=["\n"]),
        asked("r1", INSTRUCTION, DOCUMENT, QUERY, prelude=[[DOCUMENT.content_id]]),
        asked("r1", INSTRUCTION, DOCUMENT, QUERY, expected="y"),
        asked("r1", INSTRUCTION, DOCUMENT, QUERY, session="x"),
        asked("r1", INSTRUCTION, DOCUMENT, QUERY, timestamp=5),
    ],
    ids=[
        "id",
        "order of segments",
        "fewer segments",
        "max_tokens",
        "stop",
        "prelude",
        "expected",
        "session",
        "timestamp",
    ],
)
def test_the_digest_sees_what_is_replayed_and_what_a_run_keeps(file: Path, request_line: dict[str, Any]) -> None:
    assert read(file, *SOUND).digest != read(file, *SOUND[:4], request_line).digest


def test_the_digest_sees_the_order_of_requests(file: Path) -> None:
    there = read(file, *SOUND[:4], asked("r1"), asked("r2")).digest

    assert there != read(file, *SOUND[:4], asked("r2"), asked("r1")).digest


def test_the_digest_is_of_the_texts_and_not_of_short_ids() -> None:
    digests = set()
    for text in ("one", "other"):
        digest = TraceDigest()
        digest.add(Request("r1", 0, (Segment("document", "same", text),)))
        digests.add(digest.hexdigest())

    assert len(digests) == 2
