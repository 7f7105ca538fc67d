"""What a server is asked of a trace: messages, texts or token ids, tiled by segments."""

import pytest
from fakes import rolling_trace, segment

from kvaudit.engines import Capabilities
from kvaudit.errors import TraceError
from kvaudit.records import Request, Trace
from kvaudit.wordings import Wordings

ANY = Capabilities(policies=False, max_prompt_tokens=None)


def trace(*segments, **fields):
    return Trace((Request("a", 0, segments, line=3, **fields),), "d", "t.jsonl")


def test_segments_tile_the_bytes_of_the_text():
    (request,) = trace(segment("document", "é1"), segment("separator", ""), segment("query", "2")).requests
    prompt = Wordings().request(request)
    assert prompt.wording.text == "é12"
    assert [(part.kind, part.start, part.end) for part in prompt.segments] == [("document", 0, 3), ("query", 3, 4)]
    assert prompt.length == len("é12".encode())
    assert prompt.token_ids == ()


def test_what_recurs_has_the_same_id_wherever_it_stands():
    first, second = (Wordings().request(request).segments for request in rolling_trace(2, window=2).requests)
    assert first[4].content_id == second[2].content_id
    assert first[2].content_id != second[2].content_id


def test_a_chat_keeps_its_messages_and_an_empty_one_too():
    parts = (segment("message", "", role="assistant"), segment("query", "a", role="user"), segment("query", "b"))
    prompt = Wordings().request(trace(*parts, chat=True, extra='{"x":1}').requests[0])
    assert prompt.wording.messages == (("assistant", ""), ("user", "ab"))
    assert prompt.wording.extra == '{"x":1}'
    assert prompt.length == 2


def test_preludes_are_put_into_words_too():
    request = rolling_trace(2, window=2, prelude=True).requests[1]
    (before,) = Wordings().prelude(request)
    assert before.wording.text.startswith("Answer from the documents. # # document 0")


def test_token_ids_are_taken_as_they_are():
    prompt = Wordings().request(trace(segment("query", "", token_ids=(5, 6))).requests[0])
    assert (prompt.token_ids, prompt.wording.token_ids, prompt.length) == ((5, 6), (5, 6), 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (trace(segment("query", "a"), segment("query", "", token_ids=(1,))), "carries token ids in some segments"),
        (trace(segment("query", "")), "has an empty prompt"),
        (trace(segment("query", "a"), max_tokens=0), "asks for 0 tokens"),
        (trace(segment("query", "a"), prelude=((segment("query", ""),),)), "has an empty prompt"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_its_line(given, said):
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: request 'a' " + said):
        Wordings().check(given, ANY)


def test_a_sound_trace_is_taken():
    Wordings().check(rolling_trace(3, prelude=True), ANY)
