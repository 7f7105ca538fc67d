"""Every finding: planted, named, counted in tokens; and traces without the fault, in which it is not found."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from random import Random
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inspections import Characters, chat, inspected, request

from kvaudit.errors import TraceError
from kvaudit.preflight.common import common_end, common_start
from kvaudit.preflight.context import border
from kvaudit.preflight.findings import MOST_GROUPS, Finding, Findings, Place
from kvaudit.preflight.inspection import Inspection
from kvaudit.preflight.variants import canonical
from kvaudit.records import Request

LONG = "the rules are long enough to matter. "


def found(inspection: Inspection, code: str) -> list[Finding]:
    return [finding for finding in inspection.findings if finding.code == code]


def only(inspection: Inspection, code: str) -> Finding:
    (finding,) = found(inspection, code)
    return finding


def place(finding: Finding) -> tuple[str, int | None]:
    return finding.place.request_id, finding.place.segment


# Context


@pytest.mark.parametrize(
    ("left", "right", "changed"),
    [
        ("count", "hours", (True, True)),  # t + h
        ("coun", "hours", None),
        ("c", "an", None),
        ("a", "nd", (True, True)),
        ("tht", "h", (True, True)),
    ],
)
def test_borders(left: str, right: str, changed: tuple[bool, bool] | None) -> None:
    seen = border(Characters().encode, left, right)

    assert (seen and (seen.left_changed, seen.right_changed)) == changed


def test_a_border_may_change_one_side_only() -> None:
    def encode(text: str) -> list[int]:  # a leading space belongs to the word after it, unless the text begins so
        return [7] if text == "a" else [8, 9] if text == " b" else [7, 10]

    seen = border(encode, "a", " b")

    assert seen is not None
    assert (seen.left_changed, seen.right_changed, seen.alone, seen.together) == (False, True, 3, 2)


def test_every_occurrence_of_a_changed_segment_costs_its_tokens() -> None:
    trace = [request(f"r{n}", "d:count", "d:hours", "q:y") for n in range(3)]
    findings = {finding.what.split(":")[0]: finding for finding in found(inspected(trace), "context")}

    end = findings["document becomes other tokens at its end"]
    assert (place(end), end.occurrences, end.tokens) == (("r0", 1), 3, 3 * 5)
    start = findings["document becomes other tokens at its start"]
    assert (place(start), start.tokens) == (("r0", 2), 3 * 5)


def test_a_separator_that_merges_costs_the_chunk_after_it() -> None:
    finding = only(inspected([request("r0", "d:one", "s:#t", "d:hello", "q:y")]), "separator-context")

    assert (place(finding), finding.tokens) == (("r0", 2), 5)
    assert "at its end" in finding.what


def test_segments_that_stay_what_they_are_are_not_found() -> None:
    inspection = inspected([request("r0", "d:one", "s:#", "d:two", "q:y")])

    assert not found(inspection, "context")
    assert not found(inspection, "separator-context")


# Volatile text


def stamped(text: str, count: int = 3, **fields: object) -> list[Request]:
    return [
        request(f"r{n}", f"i:{text.format(n=n)} {LONG}", "d:a document that stays here", f"q:{n}", **fields)
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("At 2026-11-30T12:01:0{n}Z", "a time stamp"),
        ("At 12:0{n}", "a time stamp"),
        ("id 0f8fad5b-d9cb-469f-a165-7086728950{n}e", "a UUID"),
        ("Request {n}", "a number that counts"),
        ("nonce ab{n}9fe77", "an id or a nonce"),
        ("Hello number{n}", "an id or a nonce"),
    ],
)
def test_text_that_changes_before_text_that_stays_is_found_and_named(text: str, name: str) -> None:
    finding = only(inspected(stamped(text)), "volatile")

    assert place(finding) == ("r1", 1)
    assert finding.what.startswith(f"{name} in the instruction at token ")
    assert finding.occurrences == 2


def test_what_a_change_costs_is_what_stays_after_it() -> None:
    tokens = len(Characters().encode(f" {LONG}")) + len(Characters().encode("a document that stays here"))

    assert only(inspected(stamped("Request {n}")), "volatile").tokens == 2 * tokens


def test_a_window_that_rolls_is_not_volatile() -> None:
    rolling = [
        request(
            f"r{n}", "i:rules", *(p for k in range(4) for p in ("s: # # ", f"d:row {n + k}, 2013-01-0{n + k}")), "q:x"
        )
        for n in range(4)
    ]

    assert not found(inspected(rolling), "volatile")


def test_a_conversation_that_grows_is_not_volatile() -> None:
    trace = [request("r0", f"i:{LONG}", "m:one"), request("r1", f"i:{LONG}", "m:one", "m:two", f"d:{LONG}")]

    assert not found(inspected(trace), "volatile")


def inside(*middles: str) -> list[Request]:
    """One long message a request, in which `middle` changes."""
    return [request(f"r{n}", f"q:Read this. {middle} {LONG} Answer briefly.") for n, middle in enumerate(middles)]


def test_another_document_in_a_message_is_no_volatile_text() -> None:
    documents = [f"Document {n}: {word * 12}" for n, word in enumerate(("river ", "stone ", "market "))]
    orders = [" ".join((documents[a], documents[b])) for a, b in ((0, 1), (1, 2), (2, 0))]

    assert not found(inspected(inside(*orders)), "volatile")
    assert not found(inspected(inside(*documents)), "volatile")


def test_another_document_in_the_place_of_one_is_no_volatile_text() -> None:
    trace = [request(f"r{n}", f"d:{word * 12}", f"d:{LONG}", "q:x") for n, word in enumerate(("river ", "stone "))]

    assert not found(inspected(trace), "volatile")


@pytest.mark.parametrize(
    "written",
    [
        "At 2026-11-30T12:01:0{n}Z the session 0f8fad5b-d9cb-469f-a165-7086728950{n}e went on with request {n}7.",
        "It is {day}, and nobody would have thought of it, save for number {n}.",
    ],
)
def test_several_values_far_apart_are_volatile(written: str) -> None:
    texts = [written.format(n=n, day=day) for n, day in enumerate(("Monday", "Tuesday"))]

    assert only(inspected(inside(*texts)), "volatile").place.request_id == "r1"


def test_a_word_that_changes_is_volatile_and_a_sentence_is_not() -> None:
    assert only(inspected(inside("For Ann.", "For Bob.")), "volatile").what.startswith("text in the query")
    assert not found(inspected(inside("For the one who asks.", "To whom it may concern.")), "volatile")


def test_of_a_long_value_only_the_beginning_is_shown() -> None:
    tokens = [f"{letter * 40}1{letter * 9}" for letter in "xy"]

    what = only(inspected(inside(*tokens)), "volatile").what
    assert what.endswith(" changed ('xxxxxxxx'... of 50 characters to 'yyyyyyyy'... of 50 characters)")


def test_words_without_end_take_no_time() -> None:
    trace = [request(f"r{n}", f"i:{'.' * 200_000}{letter * 40}{'.' * 200_000} {LONG}") for n, letter in enumerate("xy")]
    began = perf_counter()

    inspected(trace)
    assert perf_counter() - began < 10


def test_rows_of_numbers_are_no_volatile_text() -> None:
    tables = ["".join(f"{n + k},{n * k},{k * 7}\n" for k in range(9)) for n in range(2)]

    assert not found(inspected(inside(*tables)), "volatile")


def test_what_stays_is_not_counted_twice() -> None:
    trace = [request(f"r{n}", f"i:{'a' * (30 + n)}", "q:x") for n in range(2)]

    assert not found(inspected(trace), "volatile")


def test_prompts_are_compared_within_their_session() -> None:
    one, two = stamped("Request {n}", 2)
    other = request("r5", f"i:Another agent. {LONG}", "d:a document that stays here", "q:5", session="b")
    mixed = [request("r0", *_written(one), session="a"), other, request("r1", *_written(two), session="a")]

    assert place(only(inspected(mixed), "volatile")) == ("r1", 1)


def _written(built: Request) -> list[str]:
    return [f"{part.kind[0]}:{part.text}" for part in built.segments]


# Texts that recur inside messages

DRAWN = Random(3)
TEXTS = ["".join(DRAWN.choices("bcdefgijklmopqrsuvwxyz ", k=200)) for _ in range(6)]


def holding(*orders: Sequence[int], kind: str = "q") -> list[Request]:
    return [
        request(f"r{n}", f"{kind}:Read {' '.join(TEXTS[at] for at in order)} Why {n}?")
        for n, order in enumerate(orders)
    ]


def test_texts_that_recur_inside_messages_at_other_places_are_found() -> None:
    inspection = inspected(holding((0, 1), (2, 0), (1, 3), (4, 5)))

    finding = only(inspection, "recurs-inside")
    assert (place(finding), finding.occurrences) == (("r1", 1), 2)
    assert finding.tokens == 2 * 201
    assert finding.what.endswith(" tokens of this query stood inside an earlier one, behind other text")
    assert finding.rule.cuts


def test_what_recurs_at_its_place_or_as_a_whole_is_not_found() -> None:
    same_place = holding((0, 1), (0, 2), (0, 3))
    whole = [request(f"r{n}", *(f"d:{TEXTS[at]}" for at in (n, n + 1)), "q:x") for n in range(4)]

    assert not found(inspected(same_place), "recurs-inside")
    assert not found(inspected(whole), "recurs-inside")


def test_a_text_that_recurs_within_one_message_only_is_not_found() -> None:
    assert not found(inspected(holding((0, 0, 0))), "recurs-inside")


def test_a_short_text_that_recurs_is_not_worth_a_word() -> None:
    short, first, second = TEXTS[5][:45], "".join(TEXTS[:3]), "".join(TEXTS[3:5])

    assert not found(
        inspected([request("r0", f"d:{short}{first}"), request("r1", f"d:{second}{short}")]), "recurs-inside"
    )


def test_separators_and_glue_are_not_looked_at() -> None:
    assert not found(inspected(holding((0, 1), (1, 0), kind="s")), "recurs-inside")


# Forms


@pytest.mark.parametrize(
    ("first", "second", "form"),
    [
        ("one  two", "one two", "white space"),
        ("one two\n", "one\ttwo", "white space"),
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', "JSON key order"),
        ('{"a": 1}', '{"a":1}', "white space"),
        (unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café"), "Unicode normalisation"),
    ],
)
def test_documents_that_differ_in_form_only_are_found(first: str, second: str, form: str) -> None:
    finding = only(inspected([request("r0", f"d:{first}", "q:x"), request("r1", f"d:{second}", "q:x")]), "form")

    assert place(finding) == ("r1", 1)
    assert finding.what == f"document repeats request 'r0', segment 1, with other {form}"
    assert finding.tokens == len(Characters().encode(second))


@pytest.mark.parametrize(
    ("first", "second"),
    [("one two", "one three"), ('{"a": 1}', '{"a": 2}'), ("[1.0]", "[1]"), ("[0.1]", "[0.1000000000000000001]")],
)
def test_documents_that_differ_in_content_are_not(first: str, second: str) -> None:
    inspection = inspected([request("r0", f"d:{first}", "q:x"), request("r1", f"d:{second}", "q:x")])

    assert not found(inspection, "form")


def test_each_further_form_costs_once() -> None:
    texts = ["one two", "one  two", "one   two", "one  two"]

    finding = only(inspected([request(f"r{n}", f"d:{text}", "q:x") for n, text in enumerate(texts)]), "form")

    assert (finding.occurrences, finding.tokens) == (2, 8 + 9)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_in_any_layout_has_one_form(value: object) -> None:

    if not isinstance(value, list | dict):
        return
    compact, wide = json.dumps(value, separators=(",", ":")), json.dumps(value, indent=3, sort_keys=True)

    assert canonical(compact) == canonical(wide)


def test_a_key_that_comes_twice_is_not_read_as_json() -> None:
    assert canonical('{"a": 1, "a": 2}') != canonical('{"a": 2}')


# Context length and repeats


def test_a_prompt_that_does_not_fit_with_its_answer_is_an_error() -> None:
    trace = [request("r0", "d:12345", "q:x", max_tokens=4), request("r1", "d:12345", "q:xy", max_tokens=4)]
    inspection = inspected(trace, context_tokens=10)

    finding = only(inspection, "beyond-context")
    assert (place(finding), finding.tokens, finding.rule.severity) == (("r1", None), 7, "error")
    assert inspection.has_errors
    assert not found(inspected(trace, context_tokens=11), "beyond-context")


def test_a_prelude_that_does_not_fit_is_an_error_too() -> None:
    trace = [request("r0", "d:12", "q:x", prelude=[("d:12345678901",)], max_tokens=1)]

    assert only(inspected(trace, context_tokens=10), "beyond-context").tokens == 11


def test_nothing_that_recurs_is_an_error() -> None:
    inspection = inspected([request(f"r{n}", f"d:{'abc'[n]}", f"q:{n}") for n in range(3)])

    assert (only(inspection, "nothing-reused").tokens, inspection.has_errors) == (6, True)


def test_reuse_behind_a_miss_only_is_told() -> None:
    inspection = inspected([request(f"r{n}", f"i:{n}", "d:stays", "q:x") for n in range(3)])

    assert only(inspection, "nothing-before-a-miss").tokens == 2 * 5
    assert not inspection.has_errors
    assert not found(inspected([request(f"r{n}", "i:0", "d:stays", "q:x") for n in range(3)]), "nothing-before-a-miss")


def test_chats_that_are_reused_are_told_what_the_default_preset_does_to_them() -> None:
    again = [chat("r0", "u:Hello"), chat("r1", "u:Hello", "a:Hi", "u:Go on")]

    finding = only(inspected(again), "chat-preset")
    characters = "<user>\n<assistant>" + "<user>\n<assistant>\n<user>\n<assistant>"
    assert finding.tokens == len(Characters().encode(characters))
    assert finding.what.startswith("2 of 2 requests are chats")
    assert not found(inspected([request("r0", "d:a", "q:x"), request("r1", "d:a", "q:y")]), "chat-preset")
    assert not found(inspected([chat("r0", "u:Hello"), chat("r1", "u:Goodbye")]), "chat-preset")


# Templates


class Forgetful(Characters):
    """Leaves think blocks out of answers that are not the last message, as some templates do."""

    def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
        kept = [
            (role, (content or "").partition("</think>")[2] or content if role == "assistant" else content)
            for role, content in messages
        ]
        start = "<think>\n\n</think>" if generation_prompt else ""
        return super().render(kept, generation_prompt) + start

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        return [*super().chat(messages), (None, "<think>\n\n</think>")]


TURNS = [
    chat("r0", "u:Hello"),
    chat("r1", "u:Hello", "a:Hi", "u:Go on"),
    chat("r2", "u:Hello", "a:Hi", "u:Go on", "a:Yes", "u:And"),
]


def test_a_template_that_keeps_what_it_served_is_not_found() -> None:
    assert not found(inspected(TURNS), "template-drift")


def test_a_generation_prompt_that_is_not_there_later_is_drift() -> None:
    finding = only(inspected(TURNS, Forgetful()), "template-drift")

    assert finding.occurrences == 2
    assert finding.what == "what the template puts before answer 2 is not there once the conversation goes on"
    assert finding.tokens == 2 * len(Characters().encode("<think>\n\n</think>"))


def test_an_earlier_turn_that_is_rendered_otherwise_names_its_message() -> None:
    class Numbering(Characters):
        def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
            last = [f"({len(messages)}) "] if messages[0][1] == "Hello" else [""]
            return super().render([(messages[0][0], f"{messages[0][1]}{last[0]}"), *messages[1:]], generation_prompt)

    finding = only(inspected(TURNS[:2], Numbering()), "template-drift")

    assert place(finding) == ("r1", 1)
    assert finding.what == "the prompt served for message 2 is not how the conversation begins later"


def test_a_null_content_that_is_written_out_is_found() -> None:
    class Literal(Characters):
        def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
            return super().render([(role, str(content)) for role, content in messages], generation_prompt)

    calls = [chat("r0", "u:Read it", "a:", "u:three lines")]

    assert place(only(inspected(calls, Literal()), "null-content")) == ("r0", 2)
    assert only(inspected(calls, Literal()), "null-content").tokens == len("None")
    assert not found(inspected(calls), "null-content")


def test_a_template_that_refuses_a_beginning_is_no_finding() -> None:
    class Strict(Characters):
        def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
            if len(messages) < 3:
                raise TraceError("roles must alternate")
            return super().render(messages, generation_prompt)

    assert not found(inspected(TURNS, Strict()), "template-drift")


# Order and bounds


def test_findings_come_costliest_first_and_the_same_every_time() -> None:
    trace = [*stamped("Request {n}"), *(request(f"r{n}", "d:count", "d:hours", "q:y") for n in (8, 9))]
    first, second = inspected(trace).findings, inspected(trace).findings

    assert len(first) > 2
    assert [finding.tokens for finding in first] == sorted((finding.tokens for finding in first), reverse=True)
    assert first == second


def test_findings_without_end_take_bounded_memory_and_lose_no_token() -> None:
    findings = Findings()
    for number in range(MOST_GROUPS + 50):
        findings.add("form", number, Place(f"r{number}", number), 1, lambda: "")

    ranked = findings.ranked()
    assert len(ranked) == MOST_GROUPS + 1
    assert sum(finding.tokens for finding in ranked) == MOST_GROUPS + 50
    assert ranked[0].occurrences == 50


@given(st.text("ab"), st.text("ab"))
def test_common_ends(left: str, right: str) -> None:
    def longest(starts: str, others: str) -> int:
        return max(length for length in range(len(starts) + 1) if others.startswith(starts[:length]))

    assert common_start(left, right) == longest(left, right)
    assert common_end(left, right) == longest(left[::-1], right[::-1])
