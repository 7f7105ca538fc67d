import tracemalloc
from dataclasses import replace

import pytest
from fakes import WordTokenizer, rolling_trace, segment

from kvaudit.engines import Capabilities
from kvaudit.errors import EngineError, TraceError, UsageError
from kvaudit.prompts import Prompts, tokens_digest
from kvaudit.records import Request, Trace

UNLIMITED = Capabilities(policies=True, max_prompt_tokens=None)


def request(*segments, **fields):
    return Request("r0", 0, segments, **fields)


def trace(*requests):
    return Trace(requests, "digest", "trace.jsonl")


def kinds(prompt):
    return [(part.kind, part.start, part.end) for part in prompt.segments]


def test_segments_are_tokenised_alone_and_tile_the_prompt():
    tokenizer = WordTokenizer()
    prompt = Prompts(tokenizer).request(
        request(segment("document", "a b c"), segment("separator", "#"), segment("query", "b d"))
    )
    assert tokenizer.decode(prompt.token_ids) == "a b c # b d"
    assert kinds(prompt) == [("document", 0, 3), ("separator", 3, 4), ("query", 4, 6)]


def test_a_segment_that_recurs_is_tokenised_once():
    tokenizer = WordTokenizer()
    prompts = Prompts(tokenizer)
    for built in rolling_trace(20, window=4, prelude=True).requests:
        prompts.request(built)
        list(prompts.prelude(built))
    assert len(tokenizer.encoded) == len(set(tokenizer.encoded))


def test_content_id_is_a_hash_of_the_ids_wherever_the_segment_stands():
    prompts = Prompts(WordTokenizer())
    first, second = (
        prompts.request(request(segment("document", "a b"), segment("document", "c"))),
        prompts.request(request(segment("document", "c"), segment("document", "a b"))),
    )
    assert first.segments[0].content_id == second.segments[1].content_id == tokens_digest(first.token_ids[:2])
    assert first.segments[0].content_id != first.segments[1].content_id
    assert tokens_digest([1, 258]) == "fb8bbe2ad3ab5292"


def test_leading_ids_belong_to_the_first_segment():
    prompts = Prompts(WordTokenizer(leading_ids=(1, 0)))
    prompt = prompts.request(request(segment("document", "a b"), segment("document", "a b")))
    assert prompt.token_ids[:2] == (1, 0)
    assert kinds(prompt) == [("document", 0, 4), ("document", 4, 6)]
    assert prompt.segments[0].content_id == tokens_digest(prompt.token_ids[:4]) != prompt.segments[1].content_id


def test_leading_ids_go_before_the_first_segment_that_has_tokens():
    prompt = Prompts(WordTokenizer(leading_ids=(1,))).request(
        request(segment("separator", ""), segment("document", "a"))
    )
    assert kinds(prompt) == [("document", 0, 2)]


def test_chat_glue_stands_in_segments_of_its_own_and_nothing_is_put_before_it():
    tokenizer = WordTokenizer(leading_ids=(1,))
    prompt = Prompts(tokenizer).request(
        request(segment("instruction", "be brief", role="system"), segment("query", "why", role="user"), chat=True)
    )
    assert tokenizer.decode(prompt.token_ids) == "<system> be brief <user> why <assistant>"
    assert [part.kind for part in prompt.segments] == ["glue", "instruction", "glue", "query", "glue"]


def test_a_chat_template_that_drops_a_message_is_refused():
    tokenizer = WordTokenizer()
    tokenizer.chat = lambda messages: [(0, messages[0][1])]
    with pytest.raises(TraceError, match=r"'r0'.*does not show each message once"):
        Prompts(tokenizer).request(
            request(segment("query", "a", role="user"), segment("query", "b", role="user"), chat=True)
        )


@pytest.mark.parametrize("pieces", [[(0, "a")], [(0, "a"), (1, "")]])
def test_a_message_without_content_is_no_chunk(pieces):
    tokenizer = WordTokenizer()
    tokenizer.chat = lambda messages: [*pieces, (None, "glue"), (2, "b")]
    messages = [("message", "a"), ("message", ""), ("query", "b")]
    asked = request(*(segment(kind, text, role="user") for kind, text in messages), chat=True)
    assert kinds(Prompts(tokenizer).request(asked)) == [("message", 0, 1), ("glue", 1, 2), ("query", 2, 3)]


def test_a_chat_template_that_shows_a_message_twice_is_refused():
    tokenizer = WordTokenizer()
    tokenizer.chat = lambda messages: [(0, "a"), (0, "a"), (1, "b")]
    with pytest.raises(TraceError, match="does not show each message once"):
        Prompts(tokenizer).request(
            request(segment("query", "a", role="user"), segment("query", "b", role="user"), chat=True)
        )


def test_segments_without_a_role_go_on_with_the_message_before_them():
    tokenizer = WordTokenizer()
    asked = request(
        segment("instruction", "read ", role="system"),
        segment("document", "one"),
        segment("message", "\n  So ", role="user"),
        segment("separator", " \n"),
        segment("document", "one"),
        segment("separator", "\n"),
        chat=True,
    )
    pieces = Prompts(tokenizer).pieces(asked, asked.segments)

    assert [(piece.segment, piece.kind, piece.text) for piece in pieces] == [
        (None, "glue", "<system>"),
        (0, "instruction", "read "),
        (1, "document", "one"),
        (None, "glue", "<user>"),
        (2, "message", "So "),
        (4, "document", "one"),
        (None, "glue", "<assistant>"),
    ]
    assert pieces[2].content_id == pieces[5].content_id


def test_a_message_of_white_space_in_several_segments_has_no_tokens():
    asked = request(
        segment("message", "", role="assistant"),
        segment("separator", "\n"),
        segment("document", " "),
        segment("query", "b", role="user"),
        chat=True,
    )
    assert [part.kind for part in Prompts(WordTokenizer()).request(asked).segments] == ["glue", "glue", "query", "glue"]


def test_a_template_that_changes_a_message_of_several_segments_is_refused():
    tokenizer = WordTokenizer()
    tokenizer.chat = lambda messages: [(0, "a c")]
    with pytest.raises(TraceError, match=r"'r0'.*changes the message of segments 1 to 2"):
        Prompts(tokenizer).request(request(segment("query", "a ", role="user"), segment("query", "b"), chat=True))


def test_a_chat_template_that_fails_names_the_request():
    tokenizer = WordTokenizer()

    def chat(messages):
        raise ValueError("no system role")

    tokenizer.chat = chat
    with pytest.raises(TraceError, match="'r0' does not fit the model's chat template: no system role"):
        Prompts(tokenizer).request(request(segment("query", "a"), chat=True))


def test_an_error_of_the_tokenizers_own_passes_unchanged():
    tokenizer = WordTokenizer()
    failure = EngineError("the model has no chat template")

    def chat(messages):
        raise failure

    tokenizer.chat = chat
    with pytest.raises(EngineError) as caught:
        Prompts(tokenizer).request(request(segment("query", "a"), chat=True))
    assert caught.value is failure


def test_ids_that_the_trace_carries_are_used_as_they_are():
    tokenizer = WordTokenizer(leading_ids=(1,))
    prompt = Prompts(tokenizer).request(
        request(segment("document", "a", token_ids=(7, 9)), segment("query", "b", token_ids=(11,)))
    )
    assert prompt.token_ids == (7, 9, 11)
    assert tokenizer.encoded == []


@pytest.mark.parametrize("token", [-1, 50, 2**31, 2**70])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(TraceError, match=rf"'r0', segment 2: token id {token} is not one of the model's \(0 to 49\)"):
        Prompts(WordTokenizer(), vocabulary_size=50).request(
            request(segment("document", "a"), segment("query", "b", token_ids=(49, token)))
        )


@pytest.mark.parametrize("kind", ["separator", "glue"])
def test_an_empty_gap_is_dropped(kind):
    prompt = Prompts(WordTokenizer()).request(request(segment(kind, " "), segment("query", "a")))
    assert kinds(prompt) == [("query", 0, 1)]


def test_an_empty_segment_that_is_no_gap_names_request_and_segment():
    with pytest.raises(TraceError, match=r"'r0', segment 2 \(document\) has no tokens"):
        Prompts(WordTokenizer()).request(request(segment("query", "a"), segment("document", " ")))


def test_a_prompt_of_empty_gaps_only_is_refused():
    with pytest.raises(TraceError, match="'r0' has a prompt without tokens"):
        Prompts(WordTokenizer()).request(request(segment("separator", " ")))


def test_the_prelude_comes_as_prompts_of_its_own():
    built = rolling_trace(2, prelude=True).requests[1]
    prompts = Prompts(WordTokenizer())
    (prelude,) = prompts.prelude(built)
    assert [part.kind for part in prelude.segments].count("document") == 4
    assert "query" not in [part.kind for part in prelude.segments]


def test_check_names_file_line_request_and_segment():
    broken = request(segment("document", ""), line=12)
    with pytest.raises(TraceError, match=r"^trace.jsonl, line 12: request 'r0', segment 1 \(document\) has no tokens"):
        Prompts(WordTokenizer()).check(trace(broken), UNLIMITED)


def test_check_looks_into_the_prelude():
    broken = request(segment("query", "a"), prelude=((segment("document", ""),),))
    with pytest.raises(TraceError, match=r"segment 1 \(document\) has no tokens"):
        Prompts(WordTokenizer()).check(trace(broken), UNLIMITED)


def test_check_refuses_a_request_for_no_answer():
    with pytest.raises(TraceError, match="'r0' asks for 0 tokens"):
        Prompts(WordTokenizer()).check(trace(request(segment("query", "a"), max_tokens=0)), UNLIMITED)


def test_prompt_and_answer_may_just_fill_the_context():
    fits = request(segment("query", "a b c"), max_tokens=7)
    Prompts(WordTokenizer()).check(trace(fits), replace(UNLIMITED, max_prompt_tokens=10))


def test_a_prompt_longer_than_the_context_names_request_tokens_and_limit():
    long = [replace(request(segment("query", "a b c")), request_id=f"r{i}", max_tokens=8) for i in range(3)]
    with pytest.raises(UsageError) as caught:
        Prompts(WordTokenizer()).check(trace(*long), replace(UNLIMITED, max_prompt_tokens=10))
    assert "request 'r0' has a prompt of 3 tokens and asks for 8, more than the 10" in caught.value.message
    assert "(3 prompts are too long)" in caught.value.message


def test_a_prelude_longer_than_the_context_is_refused():
    long = request(segment("query", "a"), prelude=((segment("document", "a " * 11),),), max_tokens=1)
    with pytest.raises(UsageError, match="a prompt of 11 tokens and asks for 0"):
        Prompts(WordTokenizer()).check(trace(long), replace(UNLIMITED, max_prompt_tokens=10))


def test_memory_grows_with_distinct_segments_not_with_prompts():
    windows = rolling_trace(400, window=84, prelude=True)
    prompts = Prompts(WordTokenizer())
    tracemalloc.start()
    prompts.check(windows, UNLIMITED)
    for built in windows.requests:
        prompts.request(built)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
