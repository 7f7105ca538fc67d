"""Prompts that are read against the prompt before: the same requests, digests and errors as without that."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.records import Request, Segment
from kvaudit.traces import read_trace
from kvaudit.traces.id_lists import IdLists
from kvaudit.traces.segments import TraceDigest, make_segment
from kvaudit.traces.streaming import open_trace

POOL = [make_segment("document", f"row {index}") for index in range(12)]
BY_ID = {segment.content_id: segment for segment in POOL}


def line(name: str, *indices: int, **fields: object) -> bytes:
    ids = [POOL[index].content_id for index in indices]
    return orjson.dumps({"request": name, "segments": ids, **fields}) + b"\n"


def listed(lists: IdLists, given: bytes) -> tuple[tuple[Segment, ...], list[Segment]]:
    found = lists.read(given)
    assert found is not None
    assert orjson.loads(found.json) == [segment.content_id for segment in found.segments]
    return found.segments, list(found.fresh)


def prompt(*indices: int) -> tuple[Segment, ...]:
    return tuple(POOL[index] for index in indices)


def test_what_the_prompt_before_had_is_not_looked_up_again() -> None:
    lists = IdLists(BY_ID)

    assert listed(lists, line("a", 0, 1, 2, 3, 4)) == (prompt(0, 1, 2, 3, 4), [*prompt(0, 1, 2, 3, 4)])
    assert listed(lists, line("b", 0, 1, 2, 3, 4)) == (prompt(0, 1, 2, 3, 4), [])
    assert listed(lists, line("c", 0, 2, 3, 4, 5)) == (prompt(0, 2, 3, 4, 5), [*prompt(5)])
    assert listed(lists, line("d", 0, 2, 6, 4, 5, 7)) == (prompt(0, 2, 6, 4, 5, 7), [*prompt(6, 7)])
    assert listed(lists, line("e", 0)) == (prompt(0), [])


def test_known_ids_are_found_without_a_look_at_the_table() -> None:
    table = dict(BY_ID)
    lists = IdLists(table)
    listed(lists, line("a", 0, 1, 2, 3))
    del table[POOL[2].content_id]

    assert listed(lists, line("b", 1, 2, 3, 4))[0] == prompt(1, 2, 3, 4)
    assert lists.read(line("c", 4, 2, 1)) is None


def test_after_lists_that_share_little_some_are_left_to_the_usual_reading() -> None:
    lists = IdLists(BY_ID)
    listed(lists, line("a", 0, 1, 2, 3))
    listed(lists, line("b", 4, 5, 6, 7))
    left = [lists.read(line("c", 4, 5, 6, 7)) for _ in range(20)]

    assert left[0] is None
    assert left[-1] is not None


@pytest.mark.parametrize(
    "given",
    [
        b'{"segments":["%s"],"request":"a"}',
        b'{"request":"a", "segments":["%s"]}',
        b'{"request":"a","segments":[ "%s"]}',
        b'{"request":"a","segments":["%s" ]}',
        b'{"request":"a","segments":["%s"],"segments":[]}',
        b'{"request":"a","segments":[]}',
        b'{"request":"a","segments":["0000000000000000"]}',
        b'{"request":"a","segments":[1234567890123456]}',
        b'{"request":"a","segments":["%s"',
        b'{"request":"a","segments":["%s"]',
        b'{"request":"a","segments":["%s"]]}',
        b'{"request":"a\\"","segments":["%s"]}',
        b'{"request":7,"segments":["%s"]}',
        b'{"segment":"x"}',
        b"",
        b"[]",
    ],
)
def test_any_other_line_is_left_to_the_usual_reading(given: bytes) -> None:
    assert IdLists(BY_ID).read(given.replace(b"%s", POOL[0].content_id.encode())) is None


def test_bytes_that_hold_an_id_are_no_id() -> None:
    """Neither a longer text nor a number, although both have the id where an id would have it."""
    lists = IdLists({"0123456789abcdef": POOL[0], "1234567890123456": POOL[1]})

    assert lists.read(b'{"request":"a","segments":["0123456789abcdef","1234567890123456"]}') is not None
    assert lists.read(b'{"request":"a","segments":["0123456789abcdefZ",1234567890123456 ]}') is None


def test_white_space_as_wide_as_an_id_is_noticed() -> None:
    raw = line("a", *range(10))
    place = raw.rindex(b'"' + POOL[9].content_id.encode())

    assert IdLists(BY_ID).read(raw) is not None
    assert IdLists(BY_ID).read(raw[:place] + b" " * len('"0123456789abcdef",') + raw[place:]) is None


def spaced(raw: bytes) -> bytes:
    return raw.replace(b'","', b'", "')


def escaped(raw: bytes) -> bytes:
    place = raw.index(b'["') + 2
    return raw[:place] + b"\\u%04x" % raw[place] + raw[place + 1 :]


def shifted(raw: bytes) -> bytes:
    """As long as before: one digit less in an id, one space more after it."""
    place = raw.index(b'["') + 2
    return raw[: place + 15] + b'" ' + raw[place + 17 :]


def damaged(raw: bytes) -> bytes:
    place = raw.index(b'["') + 5
    return raw[:place] + b"z" + raw[place + 1 :]


def doubled(raw: bytes) -> bytes:
    return raw.replace(b"}", b',"segments":["%b"]}' % POOL[3].content_id.encode())


PLAIN: Callable[[bytes], bytes] = bytes
WAYS = st.sampled_from([PLAIN] * 8 + [spaced, escaped, shifted, damaged, doubled])
PROMPTS = st.lists(st.integers(0, 11), min_size=1, max_size=12)
MORE = st.sampled_from(
    [{}, {"session": "s"}, {"prelude": [[POOL[1].content_id], [POOL[2].content_id]]}, {"max_tokens": 3}, {"x": 1}]
)


@st.composite
def traces(draw: st.DrawFn) -> bytes:
    """Prompts that begin, end and go on as the one before them, defined before their use or not at all."""
    written, defined, before = [], set(), draw(PROMPTS)
    for number in range(draw(st.integers(1, 12))):
        move = draw(st.sampled_from(["new", "grow", "roll", "cut", "edit"]))
        if move == "new":
            before = draw(PROMPTS)
        elif move == "grow":
            before = before + draw(PROMPTS)
        elif move == "roll":
            before = before[:1] + before[2:] + draw(PROMPTS)[:2]
        elif move == "cut":
            before = before[: draw(st.integers(1, 12))]
        else:
            before = [draw(st.integers(0, 11)) if index == len(before) // 2 else at for index, at in enumerate(before)]
        more = draw(MORE)
        used = {*before, 1, 2} if "prelude" in more else {*before}
        for index in sorted(used - defined):
            if draw(st.integers(0, 60)):
                segment = POOL[index]
                values = {"segment": segment.content_id, "kind": segment.kind, "text": segment.text}
                written.append(orjson.dumps(values) + b"\n")
        defined |= used
        written.append(draw(WAYS)(line(f"r{number}", *before, **more)))
    return b"".join(written)


def streamed(path: Path) -> object:
    with open_trace(path) as trace:
        return tuple(trace.requests)


def outcome(read: Callable[[], object]) -> object:
    try:
        return read()
    except TraceError as error:
        return str(error)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=traces())
def test_requests_digests_and_errors_are_those_of_the_usual_reading(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    fast = outcome(lambda: read_trace(path)), outcome(lambda: streamed(path))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(IdLists, "read", lambda lists, line: None)
        usual = outcome(lambda: read_trace(path)), outcome(lambda: streamed(path))

    assert fast == usual


def test_a_digest_is_the_same_whether_a_prompt_was_listed_or_not() -> None:
    lists, by_list, by_request = IdLists(BY_ID), TraceDigest(), TraceDigest()
    for number, indices in enumerate([(0, 1, 2), (0, 2, 3), (0, 2, 3, 4, 5)]):
        found = lists.read(line(f"r{number}", *indices))
        request = Request(f"r{number}", number, prompt(*indices))
        by_request.add(request)
        by_list.add(request, found)
        assert by_list.hexdigest() == by_request.hexdigest()
    assert by_list.distinct_segments == by_request.distinct_segments == 6


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("content", [line("a", 0), b'{"request":"a","segments":[{"kind":"query","text":"x"}]}'])
def test_garbage_is_collected_afterwards_as_before(tmp_path: Path, enabled: bool, content: bytes) -> None:
    (tmp_path / "trace").write_bytes(content)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        outcome(lambda: read_trace(tmp_path / "trace"))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
