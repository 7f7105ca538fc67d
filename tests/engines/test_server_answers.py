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
from kvaudit.engines.server.retrying import Retries
from kvaudit.engines.server.saying import page_in, with_scheme
from kvaudit.engines.server.sending import AttemptError, Connection
from kvaudit.errors import EngineError

BODY = b'{"max_tokens": 8}'
OTHER_BODY = b'{"max_tokens": 8, "prompt": "another"}'
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
CUT = streamed(event("wh"))
"""Three letters, then [DONE], and neither a reason nor a count."""

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


def test_a_count_makes_no_answer_whole_once_reasons_were_seen(served):
    counted = streamed(event("wh"), usage(2))
    connection, _ = served(WHOLE, counted, WHOLE)
    ask(connection)
    assert ask(connection) == ("whole", 2)


def test_a_server_that_never_gives_reasons_is_asked_again_once_only(served):
    connection, _ = served(CUT)
    assert ask(connection) == ("wh", 2)
    assert [ask(connection, body) for body in (BODY, OTHER_BODY)] == [("wh", 1)] * 2


def test_a_first_answer_that_was_cut_does_not_speak_for_the_server(served):
    connection, _ = served(CUT, WHOLE, CUT, WHOLE)
    assert ask(connection) == ("whole", 2)
    assert ask(connection) == ("whole", 2)


def test_a_doubt_that_was_settled_is_forgotten(served):
    full = streamed(*[event("x")] * 8, event(finish="length"))
    connection, _ = served(CUT, full, CUT, full)
    assert [ask(connection) for _ in range(2)] == [("x" * 8, 2)] * 2


def test_two_answers_to_different_questions_are_no_repeat(served):
    connection, asked = served(CUT, CUT, WHOLE)
    for body in (BODY, OTHER_BODY):
        with pytest.raises(EngineError, match="it may have been cut"):
            ask(connection, body, retries=0)
    assert len(asked) == 2


def test_reasons_that_come_late_void_answers_that_were_taken_without(served):
    connection, _ = served(CUT, CUT, WHOLE)
    assert ask(connection) == ("wh", 2)
    with pytest.raises(EngineError, match=r"at http://.* gives a finish reason to some answers and none to others"):
        ask(connection)


def test_a_count_behind_the_text_tells_the_end_where_no_reason_was_ever_seen(served):
    connection, _ = served(streamed(event("whole"), usage(3)), streamed(event("counted"), usage(4)))
    assert ask(connection) == ("whole", 1)
    assert ask(connection) == ("counted", 1)


def test_a_count_amid_the_text_tells_no_end(served):
    amid = streamed(event("wh", usage={"completion_tokens": 1}), event("ole"))
    connection, _ = served(amid, WHOLE)
    assert ask(connection) == ("whole", 2)


def test_a_server_that_gives_reasons_at_the_limit_alone_can_be_audited(served):
    full = streamed(*[event("x")] * 8, event(finish="length"))
    connection, _ = served(full, streamed(event("short"), usage(2)), full, streamed(event("bare")), full)
    told = [ask(connection) for _ in range(5)]
    assert told == [("x" * 8, 1), ("short", 1), ("x" * 8, 1), ("bare", 1), ("x" * 8, 1)]


@pytest.mark.parametrize(
    "full",
    [
        streamed(event("whole"), usage(8)),
        streamed(*[event("x")] * 8),
        streamed({"choices": [{"index": 0, "text": "whole", "token_ids": list(range(8))}]}),
    ],
    ids=["by usage", "by events", "by token ids"],
)
def test_an_answer_that_reached_its_limit_is_whole_without_a_reason(served, full):
    connection, _ = served(WHOLE, full)
    ask(connection)
    assert ask(connection)[1] == 1


@pytest.mark.parametrize(
    ("end", "timeout"), [("data: [DONE]\n\n", 5.0), ("", 0.3)], ids=["told", "by its reason alone"]
)
def test_what_comes_behind_the_end_is_not_waited_for(served, end, timeout):
    async def pings(end):
        import anyio

        yield f"data: {json.dumps(event('whole', 'stop'))}\n\n{end}".encode()
        for _ in range(100):
            await anyio.sleep(0.05)
            yield b": ping\n\n"

    connection, _ = served(lambda: StreamingResponse(pings(end), media_type="text/event-stream"), timeout=timeout)
    began = time.monotonic()
    assert ask(connection) == ("whole", 1)
    assert time.monotonic() - began < 3


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
    assert [page_in(text) for text in ("", '{"a": "<html>"}', "plain <html>", "< html")] == [None] * 4


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
