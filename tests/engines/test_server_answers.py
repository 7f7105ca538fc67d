"""What a server answers, one answer at a time: what of it is kept, what is whole, what is said where it fails."""

import itertools
import json
import ssl
import time

import pytest
from faulty_server import KEY, running
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from kvaudit.engines.server.claims import answer_text
from kvaudit.engines.server.flows import Flow
from kvaudit.engines.server.jsons import with_texts
from kvaudit.engines.server.replies import AttemptError
from kvaudit.engines.server.retrying import Retries
from kvaudit.engines.server.saying import page_in, with_scheme
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import EngineError

BODY = b'{"max_tokens": 8}'
TRICKY = 'sk-"quoted"\\and/slashed-0123'


@pytest.fixture
def served():
    """A connection to a server that gives these answers in turn, the last one for ever; (connection, requests)."""
    opened = []

    def serve(*answers, key=None, timeout=5.0):
        asked, left = [], list(answers)

        async def answer(request):
            asked.append(await request.body())
            made = left.pop(0) if len(left) > 1 else left[0]
            return made if isinstance(made, Response) else made()

        context = running(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
        url = f"http://{context.__enter__()}/v1"
        connection = Connection(url, key, ssl.create_default_context(), timeout)
        opened.append((context, connection))
        return connection, asked

    yield serve
    for context, connection in opened:
        connection.close()
        context.__exit__(None, None, None)


def event(text=None, finish=None, **more):
    return {"model": "m", "choices": [{"index": 0, "text": text or "", "finish_reason": finish}], **more}


def streamed(*events, done=True):
    lines = [f"data: {json.dumps(part)}\n\n" for part in events] + ["data: [DONE]\n\n"] * done
    return lambda: StreamingResponse(iter(lines), media_type="text/event-stream")


def usage(tokens):
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


def ask(connection, body=BODY, retries=3):
    reply, attempts = Retries(retries, lambda seconds: None).answered(lambda: connection.ask("/completions", body))
    return "".join(reply.answer.choices[0].text), attempts


WHOLE = streamed(event("whole"), event(finish="stop"))
FULL = streamed(*[event("x")] * 8, event(finish="length"))
FULL_AND_USAGE = streamed(event("x", "length", usage={"completion_tokens": 8}))
CUT = streamed(event("wh"))
"""Two letters, then [DONE], and neither a reason nor usage."""

# Whole, or cut


def test_a_cut_answer_is_asked_for_again_once_reasons_were_seen(served):
    connection, _ = served(WHOLE, CUT, WHOLE)
    assert ask(connection) == ("whole", 1)
    assert ask(connection) == ("whole", 2)


def test_a_cut_answer_never_counts_once_reasons_were_seen(served):
    connection, asked = served(WHOLE, CUT)
    ask(connection)
    with pytest.raises(EngineError, match=r"4 times in a row.*without a finish reason, and earlier ones had one"):
        ask(connection)
    assert len(asked) == 5


def test_usage_makes_no_answer_whole_once_reasons_were_seen(served):
    counted = streamed(event("wh"), usage(2))
    connection, _ = served(WHOLE, counted, WHOLE)
    ask(connection)
    assert ask(connection) == ("whole", 2)


def test_an_answer_that_was_cut_before_its_first_word_is_asked_for_again(served):
    connection, _ = served(WHOLE, streamed(), WHOLE)
    ask(connection)
    assert ask(connection) == ("whole", 2)


@pytest.mark.parametrize(
    "full", [FULL, streamed(event("x")), FULL_AND_USAGE], ids=["at its limit alone", "never", "with usage"]
)
def test_a_server_that_never_tells_its_ends_is_asked_once_each(served, full):
    connection, _ = served(full, full, CUT, full, CUT)
    assert [ask(connection)[1] for _ in range(5)] == [1] * 5


def test_bodies_in_one_piece_need_no_reason(served):
    connection, _ = served(JSONResponse(event("whole")))
    assert [ask(connection) for _ in range(2)] == [("whole", 1)] * 2


def test_usage_tells_the_end_where_reasons_come_at_the_limit_alone(served):
    full, short = streamed(*[event("x")] * 8, event(finish="length"), usage(8)), streamed(event("short"), usage(2))
    connection, _ = served(full, short, full, CUT, short)
    told = [ask(connection) for _ in range(4)]
    assert told == [("x" * 8, 1), ("short", 1), ("x" * 8, 1), ("short", 2)]


def test_a_first_answer_that_was_cut_is_asked_for_again_where_the_opening_saw_usage(served):
    opening = streamed(event("x", "length"), usage(1))
    connection, _ = served(opening, CUT, streamed(event("whole", "stop"), usage(3)))
    ask(connection)
    assert ask(connection) == ("whole", 2)


@pytest.mark.parametrize(
    "amid", [[event("wh", usage={"completion_tokens": 1}), event("ole")], [event("wh", usage={"completion_tokens": 1})]]
)
def test_usage_amid_the_text_tells_no_end(served, amid):
    counted = streamed(event("whole"), usage(3))
    connection, _ = served(counted, streamed(*amid), counted)
    ask(connection)
    assert ask(connection) == ("whole", 2)


@pytest.mark.parametrize("without", [CUT, streamed(event("wh"), usage(2))], ids=["bare", "with usage"])
def test_reasons_that_come_late_void_answers_that_were_taken_without(served, without):
    connection, _ = served(without, FULL, WHOLE)
    assert [ask(connection)[1] for _ in range(2)] == [1] * 2
    with pytest.raises(EngineError, match=r"at http://.* gives a finish reason, or usage, to some answers and none to"):
        ask(connection)


@pytest.mark.parametrize(
    "full",
    [
        streamed(event("whole"), usage(8)),
        streamed({"choices": [{"index": 0, "text": "whole", "token_ids": list(range(8))}]}),
    ],
    ids=["by usage", "by token ids"],
)
def test_an_answer_that_reached_its_limit_is_whole_without_a_reason(served, full):
    connection, _ = served(WHOLE, full)
    ask(connection)
    assert ask(connection)[1] == 1


def test_letters_are_no_tokens(served):
    """Servers that smooth their streams send an event a letter."""
    connection, _ = served(WHOLE, streamed(*[event("x")] * 8), WHOLE)
    ask(connection)
    assert ask(connection) == ("whole", 2)


@pytest.mark.parametrize("behind", [b": ping\n\n", b"", None], ids=["pings", "nothing", "a broken connection"])
@pytest.mark.parametrize(
    ("end", "timeout"), [("data: [DONE]\n\n", 5.0), ("", 0.5)], ids=["told", "by its reason alone"]
)
def test_what_comes_behind_the_end_is_neither_waited_for_nor_timed(served, behind, end, timeout):
    async def late():
        import anyio

        yield f"data: {json.dumps(event('whole', 'stop'))}\n\n{end}".encode()
        for _ in range(40):
            await anyio.sleep(0.05)
            if behind is None:
                raise OSError("the planted cut")
            if behind:
                yield behind

    connection, _ = served(lambda: StreamingResponse(late(), media_type="text/event-stream"), timeout=timeout)
    began = time.monotonic()
    reply = connection.ask("/completions", BODY)
    assert "".join(reply.answer.choices[0].text) == "whole"
    assert reply.ttft_ms <= reply.total_ms < 400
    assert time.monotonic() - began < (1.5 if end else 3)


# Errors in place of answers


@pytest.mark.parametrize(
    "said",
    [
        'event: error\ndata: {"message": "out of memory"}\n\n',
        "event: error\ndata: out of memory\n\n",
        'data: {"message": "out of memory", "code": 500}\n\n',
        'data: {"error": "out of memory"}\n\n',
        'data: {"error": {"message": "out of memory"}}\n\n',
    ],
)
@pytest.mark.parametrize("end", ["data: [DONE]\n\n", ""])
def test_an_error_amid_a_stream_is_no_end_of_an_answer(served, said, end):
    lines = [f"data: {json.dumps(event('wh'))}\n\n", said, end]
    connection, _ = served(lambda: StreamingResponse(iter(lines), media_type="text/event-stream"))
    with pytest.raises(AttemptError, match="out of memory") as failed:
        connection.ask("/completions", BODY)
    assert failed.value.kind == "broken"


def test_a_bare_message_is_no_whole_answer(served):
    connection, _ = served(JSONResponse({"message": "out of memory"}))
    with pytest.raises(AttemptError, match=r"^out of memory$"):
        connection.ask("/completions", BODY)


def test_other_events_and_names_are_no_errors(served):
    lines = [
        'event: error\n\nevent: status\ndata: {"message": "queued"}\n\n',
        f"event: message\ndata: {json.dumps(event('whole', 'stop', message='x', code=1))}\n\n",
    ]
    connection, _ = served(lambda: StreamingResponse(iter(lines), media_type="text/event-stream"))
    assert ask(connection) == ("whole", 1)


# Answers without an end


def endless(part, seconds=0.0):
    line = f"data: {json.dumps(part)}\n\n".encode()

    async def parts():
        import anyio

        for _ in itertools.count():
            await anyio.sleep(seconds)
            yield line

    return lambda: StreamingResponse(parts(), media_type="text/event-stream")


def test_a_server_that_does_not_stop_ends_the_audit(served):
    connection, asked = served(endless(event("x")))
    with pytest.raises(EngineError, match=r"at http://.* does not end an answer that may have 8 tokens"):
        ask(connection)
    assert len(asked) == 1


def test_many_small_pieces_of_an_answer_are_none_too_many(served):
    letters = streamed(*[event("x")] * 900, event(finish="stop"))
    assert ask(served(letters)[0]) == ("x" * 900, 1)


@pytest.mark.parametrize("empty", [event(), {"choices": []}, event(usage={"completion_tokens": 0}), {}])
def test_events_that_tell_nothing_are_silence(served, empty):
    connection, asked = served(endless(empty, 0.02), WHOLE, timeout=0.3)
    assert ask(connection) == ("whole", 2)
    assert len(asked) == 2


def test_more_bytes_than_an_answer_can_have_are_no_answer():
    flow = Flow(8, 5.0)
    flow.take(bytes(1 << 26))
    assert not flow.is_endless
    flow.take(bytes(1 << 20))
    assert flow.is_endless


def test_more_pieces_than_an_answer_can_have_are_no_answer():
    flow = Flow(8, 5.0)
    for _ in range(1800):
        flow.told()
    assert not flow.is_endless
    flow.told()
    assert flow.is_endless


def test_a_body_that_trickles_is_given_up(served):
    async def trickle():
        import anyio

        for _ in range(100):
            await anyio.sleep(0.05)
            yield b" "

    connection, _ = served(lambda: StreamingResponse(trickle(), media_type="application/json"), timeout=0.4)
    began = time.monotonic()
    with pytest.raises(AttemptError, match="within the time limit"):
        connection.call("GET", connection.root("/metrics"))
    assert time.monotonic() - began < 3


# Keys


@pytest.mark.parametrize("key", ["1", "null", "token", "x", "m", "EMPTY", "stop", '"'])
def test_a_key_that_is_none_changes_nothing(served, key):
    connection, _ = served(streamed(event("1 token x EMPTY", model="m"), event(finish="stop")), key=key)
    reply = connection.ask("/completions", BODY)
    assert (reply.answer.model, "".join(reply.answer.choices[0].text)) == ("m", "1 token x EMPTY")
    assert reply.answer.finished


@pytest.mark.parametrize("key", [KEY, TRICKY, "1234567890123"])
def test_a_key_is_taken_out_of_every_text(served, key):
    said = event(f"say {key}", "stop", system_fingerprint=key, created=1234567890123)
    escaped = {
        "index": 0,
        "message": {"tool_calls": [{"function": {"name": key, "arguments": json.dumps({"k": key})}}]},
    }
    connection, _ = served(
        streamed({**said, "model": key}),
        JSONResponse({**said, "model": key}),
        JSONResponse({"choices": [{**escaped, "finish_reason": "tool_calls"}]}),
        JSONResponse({"version": key, "created": 1234567890123, "deep": [[{"model": key}]]}),
        key=key,
    )
    for _ in range(2):
        reply = connection.ask("/completions", BODY)
        found = (reply.answer.model, reply.fingerprint, answer_text(reply.answer.choices[0]))
        assert found == ("[secret removed]", "[secret removed]", "say [secret removed]")
    called = connection.ask("/chat/completions", BODY).answer.choices[0]
    assert connection.without_key(answer_text(called)).count("[secret removed]") == 2
    page = json.loads(connection.call("GET", connection.root("/version"))[1])
    assert page == {"version": "[secret removed]", "created": 1234567890123, "deep": [[{"model": "[secret removed]"}]]}


@pytest.mark.parametrize("key", [KEY, TRICKY, "hunter2"])
def test_a_key_is_taken_out_of_every_error(served, key):
    told = json.dumps({"error": {"message": f"no {json.dumps(key)} and {key}"}})
    connection, _ = served(lambda: Response(told, 401), lambda: Response(f"no JSON: {json.dumps([key])}", 401), key=key)
    for _ in range(2):
        with pytest.raises(EngineError) as refused:
            ask(connection)
        assert key not in str(refused.value)
        assert json.dumps(key)[1:-1] not in str(refused.value)
        assert "[secret removed]" in str(refused.value)


def test_texts_are_changed_however_deep_they_are():
    deep = leaf = []
    for _ in range(5000):
        leaf.append([])
        leaf = leaf[0]
    leaf.append("a")
    assert with_texts(deep, str.upper) is deep
    assert leaf == ["A"]
    assert with_texts({"a": ["b", 1, None, {"c": "d"}]}, str.upper) == {"a": ["B", 1, None, {"c": "D"}]}
    assert with_texts("a", str.upper) == "A"


# What is said


def test_the_server_that_refused_is_named(served):
    connection, _ = served(JSONResponse({"error": {"message": "no"}}, 400))
    with pytest.raises(EngineError) as refused:
        ask(connection)
    assert refused.value.message == f"the server at {connection.base_url} refused a request: status 400: no"


def test_a_redirect_says_where_it_leads_and_no_secret(served):
    connection, asked = served(RedirectResponse("https://u:pw@other/login?key=abc", 302))
    with pytest.raises(EngineError) as refused:
        ask(connection)
    assert refused.value.message.endswith("refused a request: status 302: it sends on to https://other/login")
    assert "the address that answers by itself" in refused.value.hint
    assert len(asked) == 1


@pytest.mark.parametrize("status", [200, 404, 502])
def test_a_web_page_is_named_by_its_title(served, status):
    page = "<!DOCTYPE html>\n<html><head><title>Sign&nbsp;in &amp; go</title></head><body>long</body></html>"
    connection, _ = served(HTMLResponse(page, status))
    with pytest.raises(EngineError) as refused:
        ask(connection)
    assert "a web page, 'Sign in & go'" in refused.value.message
    assert "<" not in refused.value.message


def test_pages_are_told_from_answers():
    assert page_in("<html><body><script>no()</script>Not here</body>") == "a web page, 'Not here'"
    assert page_in("\ufeff <!-- x --><HTML>") == "a web page"
    assert (
        page_in("<?xml version='1.0'?>\n<!-- x --> <!--y-->\n<!DOCTYPE  html><p>Busy<style>p {}")
        == "a web page, 'Busy'"
    )
    assert [page_in(text) for text in ("", '{"a": "<html>"}', "plain <html>", "< html")] == [None] * 4


@pytest.mark.parametrize(
    "part",
    ["<!-- -->", "<!--", "<title", "<title>", "<html><script>", "<script></script", "<", "<a ", " ", "<?xml ", "&"],
)
@pytest.mark.parametrize(("before", "behind"), [("", "x"), ("<html>", ""), ("<!-- -->", "</title>"), ("<title>", "")])
def test_no_page_takes_long_to_be_read(part, before, behind):
    text = before + part * ((1 << 16) // len(part)) + behind
    began = time.process_time()
    page_in(text)
    assert time.process_time() - began < 0.5


def test_a_port_that_does_not_speak_https_is_told(served):
    connection, _ = served(WHOLE)
    secure = Connection(connection.base_url.replace("http:", "https:"), None, ssl.create_default_context(), 5.0)
    with pytest.raises(AttemptError, match=r"no connection: the port does not speak https, it seems: write http://"):
        secure.ask("/completions", BODY)
    secure.close()


def test_a_port_that_speaks_https_is_told():
    alert = r"illegal status line: bytearray(b'\x15\x03\x03\x00\x02')"
    assert with_scheme("http://gpu/v1", alert) == "the port speaks https, it seems: write https://"
    silent = with_scheme("http://gpu/v1", "Server disconnected without sending a response.")
    assert silent.endswith("a response, as a port that speaks https does")
    assert with_scheme("https://gpu/v1", alert) == alert
