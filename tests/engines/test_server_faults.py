"""What goes wrong between kvaudit and a server, and what becomes of an arm then."""

import json
import socket
import ssl
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from faulty_server import KEY, SEPARATOR, faulty_server
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine
from kvaudit.engines.server import retrying as retrying_module
from kvaudit.engines.server.sending import Connection
from kvaudit.engines.server.watching import Watch
from kvaudit.errors import EngineError, UsageError
from kvaudit.policies.as_served import AsServed
from kvaudit.records import Prompt, PromptSegment, Sampling, Wording
from kvaudit.store.manifest import engine_facts

POLICY = AsServed()
LIMIT = Sampling(8)
ROOM_FOR_A_PROBE = 3_500_000
"""Bytes: for kvaudit's own prompt, and not for another of some thousand tokens beside it."""


def settings(server, model="m", **options):
    given = {"base-url": server.url, "reset": "vllm", "patience": "0.5", "timeout": "5", **options}
    return EngineSettings(model=model, options={name.replace("_", "-"): value for name, value in given.items()})


def prompt(text, **wording):
    segments = (PromptSegment("document", "0" * 16, 0, len(text.encode())),)
    return Prompt((), segments, Wording(text=text, **wording))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """What would be waited is written down in place of it."""
    waited = []
    plain = retrying_module.Retries

    def without_pauses(limit):
        return plain(limit, waited.append)

    monkeypatch.setattr("kvaudit.engines.server.opening.Retries", without_pauses)
    return waited


@pytest.fixture
def opened():
    """Opens an engine that is closed behind the test."""
    engines = []

    def open_one(server, **options):
        engines.append(open_engine(settings(server, **options)))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def serve(engine, text="one", sampling=LIMIT):
    return engine.serve("r", "request", prompt(text), sampling, POLICY)


def next_fails(server, *failures):
    """The next questions are met by these, in turn."""
    for number, failure in enumerate(failures, server.questions):
        server.behaviour.failures[number] = failure


def status(code, text="not now", **headers):
    return lambda: JSONResponse({"error": {"message": text}}, code, headers=headers)


# Retries

BEGINNING = b'data: {"model": "m", "choices": [{"index": 0, "text": "4"}]}\n\n'


@pytest.mark.parametrize(
    "failure",
    [
        status(429),
        status(503),
        status(500),
        status(200, "out of memory"),
        "cut",
        lambda: StreamingResponse(iter([BEGINNING]), media_type="text/event-stream"),
        lambda: PlainTextResponse("<html>"),
        lambda: JSONResponse({"model": "m", "choices": [{"index": 0, "text": "4", "finish_reason": "abort"}]}),
    ],
    ids=["429", "503", "500", "an error in a 200", "cut in mid-stream", "ended before its end", "no JSON", "given up"],
)
def test_what_may_pass_is_tried_again_and_marked(opened, failure):
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, failure)
        served = serve(engine)
        assert served.attempts == 2
        again = serve(engine)
    assert (served.answer_text, again.attempts) == (again.answer_text, 1)


def test_attempts_are_bounded_and_their_pauses_grow_or_are_the_servers(opened, no_pauses):
    with faulty_server() as server:
        engine = opened(server, retries="3")
        next_fails(server, status(500), status(429, **{"retry-after": "7"}), status(500), status(500, "at last"))
        with pytest.raises(EngineError, match=r"did not answer, 4 times in a row; the last time: status 500: at last"):
            serve(engine)
    assert no_pauses == [0.5, 7.0, 2.0]


def test_no_retries_can_be_asked_for(opened):
    with faulty_server() as server:
        engine = opened(server, retries="0")
        next_fails(server, status(500))
        with pytest.raises(EngineError, match="1 times"):
            serve(engine)


def test_a_server_that_sends_nothing_is_given_up_after_the_time_limit(opened):
    """Long before the server, which was not told to stop, would answer."""
    held = threading.Event()

    async def never():
        import anyio

        while not held.is_set():
            await anyio.sleep(0.01)
        yield b""

    with faulty_server() as server:
        engine = opened(server, timeout="0.2")
        next_fails(server, lambda: StreamingResponse(never(), media_type="text/event-stream"))
        served = serve(engine)
        held.set()
    assert served.attempts == 2


def test_a_server_that_only_keeps_the_connection_open_is_given_up_too(opened):
    async def pings():
        import anyio

        for _ in range(200):
            await anyio.sleep(0.02)
            yield b": ping\n\n"

    with faulty_server() as server:
        engine = opened(server, timeout="0.3")
        next_fails(server, lambda: StreamingResponse(pings(), media_type="text/event-stream"))
        assert serve(engine).attempts == 2


@pytest.mark.parametrize("half", [b"\\ud83d", b"\xf0\x9f"])
def test_a_letter_that_is_cut_in_halves_is_an_answer(opened, half):
    body = b'{"model": "m", "choices": [{"index": 0, "text": "a%bz", "finish_reason": "stop"}]}' % half
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, lambda: Response(body, media_type="application/json"))
        served = serve(engine)
    assert (served.answer_text[0], served.answer_text[-1], served.attempts) == ("a", "z", 1)


def test_a_refusal_is_no_reason_to_ask_again(opened, no_pauses):
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, status(400, "prompt too long"))
        with pytest.raises(EngineError, match="refused a request: status 400: prompt too long"):
            serve(engine)
    assert no_pauses == []


# A server that goes away, comes back, is another, or is somebody else's too


def test_a_server_that_is_gone_voids_the_arm(opened):
    with faulty_server() as server:
        engine = opened(server)
        serve(engine)
    with pytest.raises(EngineError, match=r"went away in the middle of an arm.*the arm is void"):
        serve(engine)


def test_a_server_that_was_restarted_in_mid_arm_voids_it(opened):
    with faulty_server() as server:
        engine = opened(server)
        engine.reset()
        serve(engine)
        server.behaviour.started += 60
        with pytest.raises(EngineError, match="restarted in the middle of an arm"):
            serve(engine)


def test_a_counter_that_falls_is_a_restart_too(opened):
    with faulty_server() as server:
        engine = opened(server)
        engine.reset()
        serve(engine)
        server.answered = 0
        with pytest.raises(EngineError, match="restarted in the middle of an arm"):
            serve(engine)


def test_llamacpp_that_starts_to_count_anew_is_a_restart_too():
    pages = iter(f"llamacpp:prompt_tokens_total {total}\n" for total in (100, 150, 7))
    connection = SimpleNamespace(found=lambda path: next(pages))
    watch = Watch(connection)
    watch.begin()
    watch.check()
    with pytest.raises(EngineError, match="restarted in the middle of an arm"):
        watch.check()


def test_a_restart_that_is_the_reset_is_none_in_mid_arm(opened):
    with faulty_server() as server:
        engine = opened(server)
        serve(engine)
        server.behaviour.started += 60
        assert engine.reset().entries == 0
        assert serve(engine).attempts == 1


def test_requests_of_somebody_else_void_the_arm(opened):
    with faulty_server() as server:
        engine = opened(server)
        engine.reset()
        server.behaviour.foreign += 1
        with pytest.raises(EngineError, match="somebody else's are part of its history"):
            serve(engine)


def test_a_failed_request_is_not_somebody_elses(opened):
    with faulty_server(counters="metrics") as server:
        engine = opened(server)
        engine.reset()
        next_fails(server, status(500))
        assert serve(engine).attempts == 2
        assert serve(engine).attempts == 1


@pytest.mark.parametrize("change", [{"version": "2"}, {"model": "other"}])
def test_another_deployment_between_arms_is_refused(opened, change):
    with faulty_server() as server:
        engine = opened(server)
        engine.reset()
        for name, value in change.items():
            setattr(server.behaviour, name, value)
        with pytest.raises(EngineError, match=r"the deployment at .* was changed"):
            engine.reset()


@pytest.mark.parametrize(("change", "asked"), [({"unready": 1}, 1), ({"models_listed": False}, None)])
def test_a_server_that_says_less_for_a_moment_is_asked_again(opened, change, asked, no_pauses):
    with faulty_server() as server:
        engine = opened(server)
        for name, value in change.items():
            setattr(server.behaviour, name, value)
        if asked:
            engine._check_identity()
        else:
            with pytest.raises(EngineError, match=r"does not say any more .* it is version 1\.0, weights None"):
                engine._check_identity()
    assert len(no_pauses) == (asked or 4)


def test_an_answer_of_another_model_is_refused(opened):
    with faulty_server() as server:
        engine = opened(server)
        server.behaviour.answers_as = "m-quantised"
        with pytest.raises(EngineError, match="another model answers than before: model was 'm', is 'm-quantised'"):
            serve(engine)


def test_the_clients_processor_is_none_of_the_servers_facts(opened):
    with faulty_server() as server:
        assert engine_facts(opened(server).describe())["processor"] is None


def test_a_model_that_is_not_served_is_refused_before_anything_is_asked(opened):
    with faulty_server() as server:
        with pytest.raises(UsageError, match=r"does not serve 'x'.*serves m"):
            opened(server, model="x")
        assert server.questions == 0


# A server that closes connections behind streams, as llama.cpp does


def one_stream_a_connection(listening):
    """Answers what comes; behind a stream it hears the next request and closes the connection."""
    stream = BEGINNING.replace(b"}]", b', "finish_reason": "stop"}]') + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            asked = b""
            while not asked.endswith(b"{}"):
                asked += connection.recv(65536)
            connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(stream), stream))
            connection.recv(65536)


def test_no_request_meets_a_connection_that_closes_behind_a_stream():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = "http://{}:{}".format(*listening.getsockname())
        threading.Thread(target=one_stream_a_connection, args=(listening,), daemon=True).start()
        connection = Connection(url, None, ssl.create_default_context(), 5.0)
        assert [connection.ask("/completions", b"{}").ended for _ in range(3)] == [True] * 3
        connection.close()


# Answers that are not what they claim to be


def whole(**body):
    return lambda: JSONResponse({"id": "1", "model": "m", **body})


CHOICE = {"index": 0, "text": "ok", "finish_reason": "stop"}


def test_an_answer_in_one_piece_is_an_answer(opened):
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, whole(choices=[CHOICE], usage={"prompt_tokens": 5, "completion_tokens": 1}))
        served = serve(engine)
    assert (served.answer_text, served.prompt_tokens, served.ttft_ms, served.finish_reason) == ("ok", 5, None, "stop")
    assert served.total_ms > 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"choices": []}, "0 choices"),
        ({"choices": [CHOICE, {**CHOICE, "index": 1}]}, "2 choices"),
        ({"choices": [CHOICE], "usage": {"completion_tokens": 9}}, "9 tokens, and 8 were the limit"),
        ({"choices": [CHOICE], "usage": {"prompt_tokens": 2**63 + 5}}, "counted 9223372036854775813 prompt tokens"),
        (
            {"choices": [CHOICE], "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 6}}},
            "6 cached tokens in a prompt of 5",
        ),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(opened, body, said):
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, whole(**body))
        with pytest.raises(EngineError, match=said):
            serve(engine)


def test_calls_of_tools_and_reasoning_are_answers(opened):
    call = {"id": "call-1", "function": {"name": "look", "arguments": '{"at": 1}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    with faulty_server() as server:
        engine = opened(server, api="chat")
        next_fails(server, whole(choices=[{"index": 0, "message": message, "finish_reason": "tool_calls"}]))
        served = serve(engine)
    assert served.answer_text == '[reasoning] hm\n[tool calls] [{"name":"look","arguments":"{\\"at\\": 1}"}]'


# The opening


def test_a_server_that_is_not_there_is_an_error_before_anything_else(opened):
    with faulty_server() as server:
        pass
    with pytest.raises(EngineError, match="cannot be asked: no connection"):
        opened(server)


def test_a_completions_only_and_a_chat_only_server_are_asked_as_they_can_be(opened):
    for apis in (("completions",), ("chat",)):
        with faulty_server(apis=apis) as server:
            engine = opened(server, api="chat" if apis == ("chat",) else "auto")
            assert serve(engine).answer_text


@pytest.mark.parametrize("field", ["return_token_ids", "stream_options", "seed"])
def test_fields_that_a_server_refuses_are_left_out(opened, field):
    with faulty_server(refuses=(field,)) as server:
        engine = opened(server)
        assert serve(engine).answer_text
        assert field in engine.describe()["fields_left_out"]


def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it(opened):
    with faulty_server(refuses=("max_tokens", "return_token_ids"), newer_limit=True) as server:
        engine = opened(server)
        assert len(serve(engine).answer_text) == 8


def test_a_server_without_a_list_of_models_is_taken_at_its_word(opened):
    with faulty_server(models_listed=False) as server:
        assert opened(server, model="any").describe()["weights"] is None


# Keys


def test_the_key_comes_from_the_environment_and_stands_nowhere(opened, monkeypatch):
    monkeypatch.setenv("KVAUDIT_API_KEY", KEY)
    with faulty_server(key=KEY) as server:
        engine = opened(server)
        assert serve(engine).answer_text
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        assert KEY not in repr(engine.describe())


def test_a_key_that_the_server_repeats_is_taken_out_of_the_error(opened, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY + "-wrong")
    with faulty_server(key=KEY) as server, pytest.raises(EngineError) as refused:
        opened(server, api_key_env="MY_KEY")
    assert "wrong key: Bearer [secret removed]" in refused.value.message
    assert KEY not in str(refused.value)
    assert "--api-key-env" in refused.value.hint


def test_the_key_that_a_server_puts_into_its_answers_is_taken_out(opened, monkeypatch):
    monkeypatch.setenv("KVAUDIT_API_KEY", KEY)
    split = [
        {"model": KEY, "choices": [{"index": 0, "text": part, "finish_reason": end}]}
        for part, end in ((KEY[:9], None), (KEY[9:], "stop"))
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in split) + "data: [DONE]\n\n"
    with faulty_server(key=KEY, version=KEY, answers_as=KEY) as server:
        engine = opened(server)
        next_fails(server, lambda: StreamingResponse(iter([body]), media_type="text/event-stream"))
        assert serve(engine).answer_text == "[secret removed]"
        assert KEY not in repr(engine.describe())


@pytest.mark.parametrize("end", ["\n", "\r\n", " "])
def test_white_space_around_a_key_is_none_of_it(opened, monkeypatch, end):
    monkeypatch.setenv("KVAUDIT_API_KEY", KEY + end)
    with faulty_server(key=KEY) as server:
        assert serve(opened(server)).answer_text


@pytest.mark.parametrize("key", ["sk-one\nsk-two", "sk-\u00e4", "sk one"])
def test_what_no_header_can_hold_is_refused_unseen(opened, monkeypatch, key):
    monkeypatch.setenv("KVAUDIT_API_KEY", key)
    with faulty_server() as server, pytest.raises(UsageError, match="KVAUDIT_API_KEY holds what no key can") as refused:
        opened(server)
    assert "sk" not in str(refused.value)


def test_what_a_reset_names_is_taken_out_of_its_errors(opened, monkeypatch):
    monkeypatch.setenv("ADMIN", KEY)
    with faulty_server() as server:
        for way in (
            {"reset_url": server.url + "/$ADMIN", "reset_method": "GET"},
            {"reset_command": 'echo "no such key: $ADMIN" >&2; exit 1'},
        ):
            with pytest.raises(EngineError) as refused:
                opened(server, reset="", **way).reset()
            assert KEY not in str(refused.value)
    assert "no such key: [secret removed]" in str(refused.value)


def test_the_key_is_sent_to_no_other_host(opened, monkeypatch):
    monkeypatch.setenv("KVAUDIT_API_KEY", KEY)
    with faulty_server(key=KEY) as server, faulty_server() as elsewhere:
        engine = opened(server, reset="", reset_url=elsewhere.url.replace("/v1", "/reset_prefix_cache"))
        engine.reset()
        assert elsewhere.resets
        assert KEY not in repr(elsewhere.reset_headers)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    wanted = ("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem")
    command = ["openssl", "req", "-x509", *made, "-out", "certificate.pem", *wanted]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "certificate.pem"


def test_a_certificate_that_nobody_signed_is_refused_unless_it_is_named(opened, certificate):
    with faulty_server(certificate=certificate) as server:
        with pytest.raises(
            EngineError, match=r"cannot be asked: no connection: .*CERTIFICATE_VERIFY_FAILED"
        ) as refused:
            opened(server)
        assert "--ca" in refused.value.hint
        assert serve(opened(server, ca=str(certificate))).answer_text


# Resets


def test_a_reset_that_answers_with_success_false_is_waited_out(opened):
    with faulty_server(busy_resets=1) as server:
        assert opened(server).reset().entries == 0


def test_a_reset_that_is_elsewhere_is_not_waited_for(opened):
    with faulty_server() as server, pytest.raises(EngineError, match="answers status 307"):
        opened(server, reset="", reset_url=server.url + "/models/")._resetter.run()


def test_a_reset_that_is_not_offered_says_what_the_server_needs(opened):
    with faulty_server() as server:
        engine = opened(server, reset="sglang")
        with pytest.raises(EngineError, match=r"cannot be emptied: POST .*/flush_cache answers status 404") as refused:
            engine.reset()
    assert "SGLang offers POST /flush_cache" in refused.value.hint


def test_the_slots_of_llama_cpp_are_erased_one_by_one(opened):
    with faulty_server() as server:
        assert opened(server, reset="llamacpp").reset().entries == 0
        assert server.reset_paths[-2:] == ["/slots/0?action=erase", "/slots/1?action=erase"]


def test_a_command_resets_and_the_server_is_waited_for(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    with faulty_server() as server:
        url = server.url.replace("/v1", "/reset_prefix_cache")
        python = f"import urllib.request as u; u.urlopen(u.Request('{url}', method='POST'))"
        engine = opened(
            server, reset="", reset_command=f'test -n "$SECRET" && {sys.executable} -c "{python}"', patience="20"
        )
        assert engine.reset().entries == 0
        assert server.resets == 1


def test_a_server_that_loads_after_a_command_is_waited_for_and_not_for_ever(opened):
    with faulty_server() as server:
        engine = opened(server, reset="", reset_command="true", patience="5")
        engine._resetter.pause = lambda seconds: None
        server.behaviour.unready = 0
        engine._resetter.run()
        server.behaviour.unready = 3
        engine._resetter.run()
        assert server.behaviour.unready == 0
        engine = opened(server, reset="", reset_command="true", patience="0.2")
        server.behaviour.unready = 10_000
        with pytest.raises(EngineError, match=r"not ready 0\.2 s after the reset: status 503"):
            engine._resetter.run()


def test_a_command_may_leave_a_server_running(opened):
    with faulty_server() as server:
        began = time.monotonic()
        opened(server, reset="", reset_command="sleep 5 & true", patience="4")._resetter.run()
    assert time.monotonic() - began < 3


def test_a_reset_that_hangs_is_given_up_when_the_patience_ends(opened):
    with socket.create_server(("127.0.0.1", 0)) as listening, faulty_server() as server:
        url = "http://{}:{}/".format(*listening.getsockname())
        engine = opened(server, reset="", reset_url=url, patience="0.2", timeout="60")
        with pytest.raises(EngineError, match="nothing came within the time limit"):
            engine._resetter.run()


def test_a_command_that_fails_ends_the_audit_with_its_last_words(opened):
    with faulty_server() as server:
        engine = opened(server, reset="", reset_command="echo first; echo no such container >&2; exit 3")
        with pytest.raises(EngineError, match="command failed with 3: no such container"):
            engine.reset()


def test_a_command_that_does_not_end_is_not_waited_for_for_ever(opened):
    with faulty_server() as server:
        engine = opened(server, reset="", reset_command="sleep 30", patience="0.2")
        with pytest.raises(EngineError, match=r"not done within 0\.2 s"):
            engine.reset()


def test_a_reset_that_empties_nothing_is_seen_by_the_probe(opened):
    with faulty_server("hidden-stale-cache") as server:
        assert opened(server).reset().entries == 1


def test_nothing_is_verified_where_nothing_is_told(opened):
    with faulty_server(counters="nowhere") as server:
        engine = opened(server)
        assert engine.reset().entries is None
        assert serve(engine).reused_tokens is None


def test_one_probe_that_was_held_up_does_not_verify_a_reset(opened):
    with faulty_server("hidden-stale-cache", counters="nowhere", slow_prefill=0.15) as server:
        engine = opened(server)
        held_up = server.questions + 3

        def late():
            time.sleep(0.3)
            return whole(choices=[CHOICE])()

        server.behaviour.failures[held_up] = late
        assert engine.reset().entries == 1
        assert server.questions > held_up


@pytest.mark.parametrize(("least_cached", "last_line"), [(0, 19), (2000, 79)])
def test_a_short_probe_is_taken_where_the_server_keeps_it(opened, least_cached, last_line):
    with faulty_server(least_cached=least_cached) as server:
        assert opened(server).reset().entries == 0
    probe = server.bodies[-1]["messages"][0]["content"]
    assert f" line {last_line} " in probe
    assert f" line {last_line + 1} " not in probe


def test_times_verify_a_reset_where_nothing_is_counted(opened):
    for fault, entries in (("none", 0), ("hidden-stale-cache", 1)):
        with faulty_server(fault, counters="nowhere", slow_prefill=0.15) as server:
            assert opened(server).reset().entries == entries


def test_keys_in_a_resets_address_and_body_come_from_the_environment(opened, monkeypatch):
    monkeypatch.setenv("ADMIN", KEY)
    with faulty_server() as server:
        url = server.url.replace("/v1", "/reset_prefix_cache?key=$ADMIN")
        engine = opened(server, reset="", reset_url=url, reset_body='{"key": "$ADMIN"}')
        engine.reset()
        assert server.reset_paths[-1] == f"/reset_prefix_cache?key={KEY}"
        assert server.reset_bodies[-1] == f'{{"key": "{KEY}"}}'
        assert KEY not in engine.describe()["reset"]


# What is counted


@pytest.mark.parametrize("counters", ["usage", "timings", "metrics"])
def test_cached_tokens_are_counted_each_way(opened, counters):
    text = f"first{SEPARATOR}second"
    with faulty_server(counters=counters) as server:
        engine = opened(server)
        engine.reset()
        counted = [serve(engine, text).reused_tokens for _ in range(2)]
        assert engine.describe()["cached_tokens_from"] == counters
    assert counted == [0, len("firstsecond")]


def test_a_counter_is_read_anew_each_time_where_restarts_cannot_be_seen(opened):
    text = f"first{SEPARATOR}second"
    with faulty_server(counters="metrics", bare_metrics=True) as server:
        engine = opened(server)
        engine.reset()
        counted = [serve(engine, given).reused_tokens for given in (text, text, "another", "a third")]
        assert engine.describe()["restarts_seen_by"] == "lost connections alone"
    assert counted == [0, len("firstsecond"), 0, 0]


def test_an_answer_without_usage_says_nothing_of_cached_tokens(opened):
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, whole(choices=[CHOICE]))
        assert serve(engine).reused_tokens is None


def test_token_ids_are_taken_where_the_server_shows_them(opened):
    with faulty_server(shows_ids=True) as server:
        served = serve(opened(server))
    assert bytes(served.answer_ids).decode() == served.answer_text


def test_a_prelude_is_asked_for_one_token(opened):
    with faulty_server() as server:
        opened(server).serve("r", "prelude", prompt("before"), Sampling(0), POLICY)
        assert server.bodies[-1]["max_tokens"] == 1


def test_a_trace_that_does_not_fit_the_api_is_refused(opened):
    chat = Prompt((), (PromptSegment("query", "0" * 16, 0, 2),), Wording(messages=(("user", "Hi"),)))
    ids = Prompt((1,), (PromptSegment("query", "0" * 16, 0, 1),), Wording(token_ids=(1,)))
    with faulty_server() as server:
        for api, given in (("completions", chat), ("chat", ids)):
            with pytest.raises(UsageError, match=f"--api {api}, and the trace has"):
                opened(server, api=api).serve("r", "request", given, LIMIT, POLICY)


def test_full_prefill_under_a_reset_that_empties_nothing_is_none(opened):
    """Nothing of the prompt was cached, and yet the answer is no full prefill that anybody can vouch for."""
    with faulty_server("hidden-stale-cache") as server:
        engine = opened(server, reference="reset")
        engine.reset()
        served = engine.serve("r", "request", prompt("never seen before"), LIMIT, None)
    assert served.reused_tokens == 1


def test_a_probe_that_was_evicted_meanwhile_does_not_vouch_for_a_reset(opened):
    with faulty_server("hidden-stale-cache", counters="timings", capacity=ROOM_FOR_A_PROBE) as server:
        engine = opened(server)
        engine.reset()
        serve(engine, "long " * 500)
        assert engine.reset().entries == 1


def test_a_probe_that_is_never_cached_vouches_for_nothing(opened):
    with faulty_server("no-reuse", counters="timings") as server:
        engine = opened(server)
        assert engine.reset().entries is None
        assert engine.describe()["reset_verified_by"].startswith("nothing")


def test_a_response_of_the_wrong_kind_is_told(opened):
    with faulty_server() as server:
        engine = opened(server)
        next_fails(server, lambda: Response("", 204))
        with pytest.raises(EngineError, match="204"):
            serve(engine)
