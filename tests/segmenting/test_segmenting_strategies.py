"""What each strategy makes of a message."""

from __future__ import annotations

import time

import pytest
from segmenting_traces import Bytes, Words, chat, cut, plain, segmented, told

from kvaudit.errors import UsageError
from kvaudit.records import Request
from kvaudit.segmenting import patterns
from kvaudit.segmenting.strategies import KNOWN, parse_strategies
from kvaudit.traces.segments import make_segment


@pytest.mark.parametrize(
    ("written", "message", "hint"),
    [
        ("words", "unknown strategy 'words'", "known: message, part, tool-result, separator:TEXT, pattern:REGEX, json"),
        ("", "unknown strategy ''", "auto"),
        ("separator", "the strategy 'separator' needs TEXT", "write separator:TEXT"),
        ("separator:", "the strategy 'separator' needs TEXT", "write separator:TEXT"),
        ("auto:3", "the strategy 'auto' takes nothing behind a colon", "write auto"),
        ("tokens:0", "'tokens:0' has no number of tokens", "tokens:256"),
        ("tokens:x", "'tokens:x' has no number of tokens", "tokens:256"),
        ("tokens:²", "'tokens:²' has no number of tokens", "tokens:256"),
        ("pattern:(", "the pattern '(' is broken: missing )", "regular expression"),
    ],
)
def test_what_is_no_strategy_is_refused(written: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategies([written])
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("later", ["part", "tool-result"])
def test_parts_are_read_first_or_not_at_all(later: str) -> None:
    with pytest.raises(UsageError, match=f"the strategy '{later}' goes by parts"):
        parse_strategies(["message", later])


def test_every_strategy_can_be_made() -> None:
    for known in KNOWN:
        assert parse_strategies([f"{known.name}:3" if known.argument else known.name])[0].known is known


def test_messages_are_joined_and_keep_what_they_are() -> None:
    request = chat(
        "r0", "i/y:Help", "d:one", "m/u:Read", "s:\n", "d:two", "d/u:three", "s: ", "q:Why?", "s/a:\n", "s: "
    )

    assert cut(request, "message") == ["i/y:Helpone", "m/u:Read\ntwo", "q/u:three Why?", "s/a:\n "]


def test_a_prompt_without_chat_is_one_message() -> None:
    assert cut(plain("r0", "i:Help", "s:#", "d:one", "s:#", "q:Why?"), "message") == ["q:Help#one#Why?"]


def test_what_stands_for_token_ids_is_not_joined() -> None:
    ids = make_segment("document", "", token_ids=(1, 2))
    parts = [make_segment("document", text) for text in ("a", "b")]
    request = Request("r0", 0, (*parts, ids, *parts))

    assert told(segmented([request], "message").requests[0].segments) == ["d:ab", "d:", "d:ab"]


def test_parts_stay_as_they_were_read() -> None:
    request = chat("r0", "i/y:Help", "i:well", "m/a:Look", "s:\n", "m:{}", "t/t:two", "t:three")

    assert segmented([request], "part").requests == [request]
    assert cut(request, "tool-result") == ["i/y:Helpwell", "m/a:Look\n{}", "t/t:two", "t:three"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["q/u:one", "s:\n", "q:two", "q:Why?"], ["d/u:one", "s:\n", "d:two", "q:Why?"]),
        (["m/u:one", "m:Why?", "s:\n"], ["d/u:one", "m:Why?", "s:\n"]),
        (["q/u:Why?"], ["q/u:Why?"]),
        (["q/u:Read ", "d:one", "q:Why?"], ["q/u:Read ", "d:one", "q:Why?"]),
        (["d/u:one", "d:two"], ["d/u:one", "d:two"]),
    ],
)
def test_of_what_a_user_sends_in_parts_the_last_asks_and_the_others_are_documents(
    before: list[str], after: list[str]
) -> None:
    assert cut(chat("r0", *before), "part") == after


def test_a_document_in_a_part_is_the_same_segment_in_later_turns() -> None:
    first, second = chat("r0", "q/u:one", "q:Why?"), chat("r1", "m/u:one", "m:Why?", "m/a:So.", "q/u:And?")
    done = segmented([first, second], "part").requests

    assert done[0].segments[0] is done[1].segments[0]


def test_parts_and_results_are_held_against_whole_messages() -> None:
    requests = [chat("r0", "q/u:one", "q:Why?", "t/t:a", "t:b"), chat("r1", "q/u:Why?")]

    (by_part,), (by_result,), (none,) = (
        segmented(given, strategy).steps
        for given, strategy in ((requests, "part"), (requests, "tool-result"), (requests[1:], "part"))
    )
    assert by_part.sentence() == "part: 1 of 2 requests is cut otherwise than by message, 3 segments became 5"
    assert by_result.sentence() == (
        "tool-result: 1 of 2 requests is cut otherwise than by message, 3 segments became 4"
    )
    assert none.sentence() == "part: no message has several parts; no request is cut otherwise than by message"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("q/u:one##two##Why?", ["d/u:one", "s:##", "d:two", "s:##", "q:Why?"]),
        ("m/u:one##two##Why?", ["d/u:one", "s:##", "d:two", "s:##", "m:Why?"]),
        ("i/y:Help##one##two", ["i/y:Help", "s:##", "d:one", "s:##", "d:two"]),
        ("t/t:one##two", ["d/t:one", "s:##", "d:two"]),
        ("q/u:##one## ##Why?##\n", ["s/u:##", "d:one", "s:##", "s: ", "s:##", "q:Why?", "s:##", "s:\n"]),
        ("q/u:####", ["s/u:##", "s:##"]),
        ("q/u:one#two", ["q/u:one#two"]),
        ("s/u:one##two", ["s/u:one##two"]),
        ("m/a:", ["m/a:"]),
    ],
)
def test_a_separator_divides_documents(before: str, after: list[str]) -> None:
    assert cut(before, "separator:##") == after


def test_escapes_in_a_separator() -> None:
    assert cut("q/u:a\n\tb", r"separator:\n\t") == ["d/u:a", "s:\n\t", "q:b"]
    assert cut(r"q/u:a\nb", r"separator:\\n") == ["d/u:a", r"s:\n", "q:b"]
    assert cut("q/u:a:b", "separator::") == ["d/u:a", "s::", "q:b"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("q/u:Read <d>a\nb</d>\n<d>c</d> Why?", ["q/u:Read ", "d:<d>a\nb</d>", "s:\n", "d:<d>c</d>", "q: Why?"]),
        ("t/t:<d>a</d>", ["d/t:<d>a</d>"]),
        ("i/y:<d>a</d> and ", ["d/y:<d>a</d>", "i: and "]),
        ("q/u:<d>a", ["q/u:<d>a"]),
        ("s/u:<d>a</d>", ["s/u:<d>a</d>"]),
        ("m/a:", ["m/a:"]),
    ],
)
def test_what_matches_a_pattern_is_a_document(before: str, after: list[str]) -> None:
    assert cut(before, "pattern:<d>.*?</d>") == after


def test_a_pattern_that_matches_nothing_at_all_is_refused() -> None:
    with pytest.raises(UsageError, match=r"request 'r0': the pattern 'x\*' matches the empty text"):
        cut("q/u:Why?", "pattern:x*")


def test_a_pattern_that_takes_too_long_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LONGEST_SEARCH", 0.2)
    started = time.monotonic()

    with pytest.raises(UsageError, match=r"request 'r0': the pattern .* on a text of 5,001 characters"):
        cut("q/u:" + "a" * 5000 + "b", "pattern:(?:a|aa)+(?:a|aa)+c")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            't/t:{"found": [\n  {"a": 1.50},\n  {"b":"]"}\n]} Done',
            ['t/t:{"found": ', "s:[\n  ", 'd:{"a": 1.50}', "s:,\n  ", 'd:{"b":"]"}', "s:\n]", "t:} Done"],
        ),
        (
            'q/u:["a","b"]["c",["d"]]',
            ["s/u:[", 'd:"a"', "s:,", 'd:"b"', "s:]", "s:[", 'd:"c"', "s:,", 'd:["d"]', "s:]"],
        ),
        ('t/t:[[{"a":1},{"b":2}]]', ["t/t:[", "s:[", 'd:{"a":1}', "s:,", 'd:{"b":2}', "s:]", "t:]"]),
        ('t/t:["only"]', ['t/t:["only"]']),
        ("t/t:[1, 2] and [null, true] and []", ["t/t:[1, 2] and [null, true] and []"]),
        ('t/t:["a", 1]', ['t/t:["a", 1]']),
        ('t/t:["a", "b"', ['t/t:["a", "b"']),
        ('t/t:["a", "b",]', ['t/t:["a", "b",]']),
        ("t/t:" + "[" * 100_000, ["t/t:" + "[" * 100_000]),
        ("m/a:", ["m/a:"]),
    ],
)
def test_items_of_json_lists_are_documents(before: str, after: list[str]) -> None:
    assert cut(before, "json") == after


def test_tokens_cut_to_a_size_and_leave_a_rest() -> None:
    words = Words()

    assert cut("q/u:one two three four five", "tokens:2", tokenizer=words) == [
        "q/u:one two",
        "q: three four",
        "q: five",
    ]
    assert cut("q/u:one two", "tokens:2", tokenizer=words) == ["q/u:one two"]
    assert cut("m/a:", "tokens:2", tokenizer=words) == ["m/a:"]


def test_tokens_do_not_cut_characters() -> None:
    assert cut("q/u:aé😀😀b", "tokens:2", tokenizer=Bytes()) == ["q/u:aé", "q:😀", "q:😀", "q:b"]


def test_token_ids_are_cut_where_they_stand_alone_or_are_the_tokenizers() -> None:
    words = Words()
    ids = tuple(words.offsets("one two three")[0])
    alone = make_segment("document", "", token_ids=(5, 6, 7))
    same, other = (make_segment("document", "one two three", token_ids=carried) for carried in (ids, ids[::-1]))

    parts = segmented([Request("r0", 0, (alone, same, other))], "tokens:2", tokenizer=words).requests[0].segments

    assert [(part.text, part.token_ids) for part in parts] == [
        ("", (5, 6)),
        ("", (7,)),
        ("one two", ids[:2]),
        (" three", ids[2:]),
        ("one two three", ids[::-1]),
    ]


def test_strategies_go_on_where_the_ones_before_them_stopped() -> None:
    before = "q/u:<d>a|b</d>|Why?"

    assert cut(before, "pattern:<d>.*?</d>", "separator:|") == ["d/u:<d>a", "s:|", "d:b</d>", "s:|", "q:Why?"]
    assert cut(before, "separator:|", "pattern:<d>.*?</d>") == ["d/u:<d>a", "s:|", "d:b</d>", "s:|", "q:Why?"]
    assert cut(before, "separator:|", "message") == [before]


def test_preludes_are_cut_too_and_what_stays_is_the_same_object() -> None:
    changed = plain("r0", "q:Why?", prelude=[["d:one#two"], ["d:three"]])
    same = plain("r1", "q:Why?")
    done = segmented([changed, same], "separator:#")

    assert [told(prompt) for prompt in done.requests[0].prelude] == [["d:one", "s:#", "d:two"], ["d:three"]]
    assert done.requests[1] is same
    (step,) = done.steps
    assert step.as_data() == {"strategy": "separator:#", "requests_changed": 1, "segments": [4, 6]}
    assert step.sentence() == "separator:#: 1 of 2 requests is cut otherwise than before, 4 segments became 6"


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("json", "no JSON list of two or more objects, lists or strings was found"),
        ("pattern:<d>", "the pattern matches nothing"),
        ("separator:##", "the text stands nowhere"),
    ],
)
def test_a_strategy_that_finds_nothing_says_so_and_where_it_looked(strategy: str, why: str) -> None:
    ids = make_segment("document", "", token_ids=(1, 2))
    requests = [chat("r0", "i/y:Help", "q/u:Why?"), chat("r1", "i/y:Help", "q/u:So?"), Request("r2", 2, (ids,))]

    (step,) = segmented(requests, strategy).steps

    where = "3 distinct texts looked at, 1 with token ids left out (instruction 1, query 2; 11 characters)"
    assert step.sentence() == f"{strategy}: {why}; {where}; no request is cut otherwise than before"


def test_what_is_found_and_is_a_document_already_is_not_called_missing() -> None:
    (step,) = segmented([chat("r0", "d/u:<d>a</d>")], "pattern:<d>.*</d>").steps

    assert step.sentence() == "pattern:<d>.*</d>: no request is cut otherwise than before"


def test_no_text_to_look_at_is_said_too() -> None:
    (step,) = segmented([Request("r0", 0, (make_segment("document", "", token_ids=(1, 2)),))], "json").steps

    assert "; 0 distinct texts looked at, 1 with token ids left out; " in step.sentence()
