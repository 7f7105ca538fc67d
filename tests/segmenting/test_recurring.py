"""The strategy `auto`: documents that were planted come out as the same segment wherever they stand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segmenting_traces import Bytes, NoTokenizer, Words, chat, plain, segmented, told

from kvaudit.records import Request
from kvaudit.segmenting.applying import Segmented
from kvaudit.traces.segments import make_segment

DRAWN = random.Random(4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word() -> str:
    return "".join(DRAWN.choices(LETTERS, k=DRAWN.randint(3, 9)))


def sentence(words: int = 40) -> str:
    return " ".join(word() for _ in range(words)).capitalize() + "."


DOCUMENTS = [sentence(DRAWN.randint(40, 90)) for _ in range(6)]
ONE, TWO, THREE = DOCUMENTS[:3]


def found(requests: list[Request], tokenizer: object = None) -> Segmented:
    return segmented(requests, "auto", tokenizer=tokenizer or Words())


def documents(done: Segmented) -> Counter[str]:
    return Counter(part.text for request in done.requests for part in request.segments if part.kind == "document")


def test_documents_in_any_order_are_found_to_the_letter() -> None:
    orders = [(0, 1, 2), (2, 0, 1), (1, 3, 0), (3, 4, 5), (5, 2, 4), (4, 1, 3)]
    requests = [
        chat(f"r{n}", "i/y:You help.", "q/u:" + "\n\n".join(["Read:", *(DOCUMENTS[at] for at in order), f"Why {n}?"]))
        for n, order in enumerate(orders)
    ]

    done = found(requests)

    assert documents(done) == Counter(DOCUMENTS[at] for order in orders for at in order)
    assert told(done.requests[0].segments) == [
        "i/y:You help.",
        "q/u:Read:\n\n",
        f"d:{ONE}",
        "s:\n\n",
        f"d:{TWO}",
        "s:\n\n",
        f"d:{THREE}",
        "q:\n\nWhy 0?",
    ]
    (step,) = done.steps
    sizes = sorted(len(Words().offsets(text)[0]) for text in DOCUMENTS)
    assert step.found["recurring_texts"] == 6
    assert step.found["recurring_in_requests"] == [2, 4]
    assert abs(float(str(step.found["median_tokens"])) - sum(sizes[2:4]) / 2) < 4
    assert step.sentence().startswith("auto: 6 texts recur inside messages, in 2 to 4 requests (median ")
    assert "6 of 6 requests are cut otherwise than before, 12 segments became " in step.sentence()


@pytest.mark.parametrize("tokenizer", [Words(), Bytes()])
@pytest.mark.parametrize("between", ["\n\n", " ", "\n", "\n--- \n", "; ", "  "])
def test_what_stands_between_documents_does_not_matter(between: str, tokenizer: object) -> None:
    requests = [
        plain(f"r{n}", f"q:{word()} {n}{between}{first}{between}{second}{between}{word()} {n}")
        for n, (first, second) in enumerate([(ONE, TWO), (TWO, ONE), (THREE, ONE), (TWO, THREE)])
    ]

    cut = documents(found(requests, tokenizer))
    assert sum(cut.values()) == 8
    assert sorted(text.strip("; ") for text in cut) == sorted([ONE, TWO, THREE])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=2, max_size=6),
    st.sampled_from(["\n\n", " ", "\n---\n", "</d><d>", ""]),
    st.sampled_from([Words, Bytes]),
)
def test_a_document_with_different_neighbours_is_one_segment_in_all_its_places(
    served: list[list[int]], between: str, tokenizer: type[Words | Bytes]
) -> None:
    requests = [
        plain(f"r{n}", "q:" + between.join([f"Question {n}:", *(DOCUMENTS[at] for at in order), f"Why {n}?"]))
        for n, order in enumerate(served)
    ]
    cut = documents(found(requests, tokenizer()))

    for number, document in enumerate(DOCUMENTS):
        places = [(n, at) for n, order in enumerate(served) for at, one in enumerate(order) if one == number]
        before = {served[n][at - 1] if at else None for n, at in places}
        after = {[*served[n], None][at + 1] for n, at in places}
        if len({n for n, _ in places}) > 1 and len(before) > 1 and len(after) > 1:
            ((text, count),) = [(text, count) for text, count in cut.items() if document[3:-3] in text]
            assert count == len(places)
            assert len(text) - len(document) <= len(f".{between}{between}")  # all documents end in a full stop


def test_a_document_is_the_same_behind_a_space_and_behind_a_line_end() -> None:
    requests = [plain(f"r{n}", f"q:{word()}{before}{ONE}{word()}") for n, before in enumerate([" ", "\n", ""])]
    requests[2] = plain("r2", f"q:{ONE} {word()}")

    assert documents(found(requests)) == {ONE: 3}


def test_a_document_is_the_same_whatever_its_last_token_takes_in() -> None:
    requests = [plain(f"r{n}", f"q:{word()}: {ONE}{behind}{word()}") for n, behind in enumerate(["\n", " ", "\n\n"])]

    assert documents(found(requests)) == {f": {ONE}": 3}


def test_a_word_that_is_shared_in_part_is_left_outside() -> None:
    requests = [
        plain(f"r{n}", f"q:{start}ing {ONE} so{end}") for n, (start, end) in enumerate([("go", "ft"), ("see", "rt")])
    ]

    assert documents(found(requests, Bytes())) == {f" {ONE}": 2}


def test_a_recurring_line_begins_where_the_line_does() -> None:
    requests = [plain(f"r{n}", f"q:{n} {mark}:\n{ONE}\n{n}") for n, mark in enumerate(["reading", "asking"])]

    assert documents(found(requests, Bytes())) == {ONE: 2}


def test_a_message_that_recurs_as_a_whole_stays_what_it_is() -> None:
    requests = [chat(f"r{n}", f"i/y:{ONE}", f"q/u:{word()}") for n in range(3)]

    done = found(requests)

    assert done.requests == requests
    assert done.steps[0].sentence() == (
        "auto: no 32 tokens in a row recur inside different messages of different requests (129 prompt tokens looked "
        "at); no request is cut otherwise than before"
    ).replace("129", str(done.steps[0].found["prompt_tokens"]))
    assert done.steps[0].found == {"recurring_texts": 0, "prompt_tokens": done.steps[0].found["prompt_tokens"]}


def test_a_message_is_found_inside_another() -> None:
    requests = [chat("r0", f"i/y:{ONE}", "q/u:Why?"), chat("r1", f"q/u:They say: {ONE} Why?")]

    done = found(requests)

    assert done.requests[0] is requests[0]
    assert told(done.requests[1].segments) == ["q/u:They say: ", f"d:{ONE}", "q: Why?"]


def test_what_recurs_within_one_request_only_is_not_cut() -> None:
    once = [chat("r0", f"m/u:{word()} {ONE} {word()}", f"q/u:{word()} {ONE} {word()}"), chat("r1", "q/u:Why?")]
    twice = [once[0], chat("r1", *(f"{part.kind[0]}/u:{part.text}" for part in once[0].segments))]

    assert found(once).steps[0].changed == 0
    assert found(twice).steps[0].changed == 2


def test_what_is_short_is_not_cut() -> None:
    short = " ".join(word() for _ in range(31))
    requests = [plain(f"r{n}", f"q:{n} {short} {word()}") for n in range(3)]

    assert found(requests).steps[0].changed == 0


def test_preludes_are_looked_at() -> None:
    requests = [plain("r0", "q:Why?", prelude=[[f"d:{word()} {ONE}"]]), plain("r1", f"q:{ONE} {word()}")]

    done = found(requests)

    assert ONE in [part.text for part in done.requests[0].prelude[0]]
    assert documents(done) == {ONE: 1}


def test_separators_and_glue_are_not_looked_into() -> None:
    requests = [
        plain("r0", f"s:{word()} {ONE} {word()}", "q:Why?"),
        plain("r1", f"s:{ONE} {word()}", f"q:{word()} {ONE}"),
    ]

    done = found(requests)

    assert done.steps[0].changed == 0
    assert done.steps[0].found["recurring_texts"] == 0


def test_kinds_of_what_is_left_are_kept() -> None:
    requests = [chat(f"r{n}", f"{kind}:{n} {ONE} {word()} {n}") for n, kind in enumerate(["i/y", "t/t"])]

    kinds = [[part.kind for part in request.segments] for request in found(requests).requests]

    assert kinds == [["instruction", "document", "instruction"], ["tool-result", "document", "tool-result"]]


def test_token_ids_are_cut_without_a_tokenizer() -> None:
    document = tuple(range(100, 150))
    prompts = [(1, 2, *document, 3), (4, *document, 5, 6)]
    requests = [Request(f"r{n}", n, (make_segment("query", "", token_ids=ids),)) for n, ids in enumerate(prompts)]

    done = found(requests, NoTokenizer())

    assert [[(part.kind, part.token_ids) for part in request.segments] for request in done.requests] == [
        [("query", (1, 2)), ("document", document), ("query", (3,))],
        [("query", (4,)), ("document", document), ("query", (5, 6))],
    ]


def test_token_ids_that_stand_beside_a_text_are_left_alone() -> None:
    ids = tuple(range(100, 150))
    requests = [Request(f"r{n}", n, (make_segment("query", "text", token_ids=(n, *ids)),)) for n in range(2)]

    assert found(requests, NoTokenizer()).steps[0].changed == 0


def test_a_cut_never_falls_into_a_character() -> None:
    """The bytes of 😀 and 😁 differ in the last one only, so that as tokens three of four recur."""
    requests = [plain(f"r{n}", f"q:{n}{mark}{ONE}{mark}{n}") for n, mark in enumerate(["😀", "😁"])]

    assert documents(found(requests, Bytes())) == {ONE: 2}


def test_text_that_repeats_itself_is_one_document() -> None:
    requests = [plain(f"r{n}", f"q:{'- ' * (200 + n)}{word()}") for n in range(3)]

    done = found(requests)

    assert list(documents(done).values()) == [3]
