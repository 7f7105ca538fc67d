"""What a capture holds of what real clients asked."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import orjson
import pytest
from proxy_processes import ProxyProcess, exchanges_in, http, lines_of, recorded, running_proxy, running_service
from proxy_service import SECRET, WORDS

from kvaudit.proxy.exchange import Exchange, api_of, session_of
from kvaudit.traces.source import TraceSource

TEXT = "".join(WORDS)
MESSAGES: Any = [{"role": "user", "content": "What is it?"}]
COOKIE = "session=a-cookie-that-nobody-should-see"


@dataclass
class Setup:
    service: str
    proxy: ProxyProcess
    capture: Path

    def new(self, call: Any) -> dict[str, Any]:
        before = len(exchanges_in(self.capture))
        call()
        return recorded(self.capture, before + 1)[-1]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.proxy.url}/v1", api_key=SECRET, max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.proxy.url, api_key=SECRET, max_retries=0)


@pytest.fixture(scope="module", params=["capture.jsonl", "capture.jsonl.gz", "capture.jsonl.zst"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    capture = tmp_path_factory.mktemp("recording") / request.param
    with running_service() as service, running_proxy(f"http://{service}", capture) as proxy:
        yield Setup(service, proxy, capture)
        text = b"".join(line for _, line in TraceSource("capture", capture).lines())
        assert text
        for secret in (SECRET, COOKIE, COOKIE.partition("=")[2], base64.b64encode(SECRET.encode()).decode()):
            assert secret.encode() not in text
        assert SECRET not in proxy.stderr


def answer_of(exchange: dict[str, Any]) -> tuple[str, str | None]:
    (choice,) = exchange["answer"]["choices"]
    return choice["text"], choice["finish_reason"]


def test_a_chat_is_recorded(setup: Setup) -> None:
    exchange = setup.new(lambda: setup.openai.chat.completions.create(model="m", messages=MESSAGES, user="u1"))

    assert exchange["api"] == "chat"
    assert exchange["path"] == "/v1/chat/completions"
    assert (exchange["status"], exchange["outcome"], exchange["streamed"]) == (200, "complete", False)
    assert exchange["request"] == {"model": "m", "messages": MESSAGES, "user": "u1"}
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]
    assert exchange["session"] == "u1"
    assert exchange["usage"] == {"prompt_tokens": 100, "completion_tokens": 5, "cached_tokens": 64}
    assert answer_of(exchange) == (TEXT, "stop")
    assert 0 < exchange["ttft_ms"] <= exchange["total_ms"]
    assert exchange["request_headers"] == {"content-type": "application/json"}


def test_a_streamed_chat_is_put_together(setup: Setup) -> None:
    def call() -> None:
        stream = setup.openai.chat.completions.create(
            model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == TEXT

    exchange = setup.new(call)

    assert exchange["streamed"]
    assert answer_of(exchange) == (TEXT, "stop")
    assert exchange["usage"]["cached_tokens"] == 64


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_recorded(setup: Setup, stream: bool) -> None:
    def call() -> None:
        answer: Any = setup.openai.completions.create(model="m", prompt="Say", stream=stream)
        assert "".join(c.choices[0].text for c in answer) == TEXT if stream else answer.choices[0].text == TEXT

    exchange = setup.new(call)

    assert (exchange["api"], exchange["streamed"]) == ("completions", stream)
    assert answer_of(exchange) == (TEXT, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_recorded(setup: Setup, stream: bool) -> None:
    def call() -> None:
        answer: Any = setup.openai.responses.create(model="m", input="Say", stream=stream)
        told = [event.delta for event in answer if event.type == "response.output_text.delta"] if stream else []
        assert ("".join(told) if stream else answer.output_text) == TEXT

    exchange = setup.new(call)

    assert (exchange["api"], exchange["streamed"]) == ("responses", stream)
    assert answer_of(exchange) == (TEXT, "completed")
    assert exchange["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 8}
    assert exchange["answer"]["id"] == "resp-1"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_messages_are_recorded(setup: Setup, stream: bool) -> None:
    def call() -> None:
        given: Any = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "metadata": {"user_id": "u2"}}
        if stream:
            with setup.anthropic.messages.stream(**given) as events:
                assert "".join(events.text_stream) == TEXT
        else:
            assert setup.anthropic.messages.create(**given).content[0].text == TEXT  # type: ignore[union-attr]

    exchange = setup.new(call)

    assert (exchange["api"], exchange["streamed"], exchange["session"]) == ("messages", stream, "u2")
    assert answer_of(exchange) == (TEXT, "end_turn")
    assert exchange["usage"]["prompt_tokens"] == 42
    assert exchange["usage"]["cached_tokens"] == 30
    assert exchange["usage"]["cache_written_tokens"] == 5


def test_other_calls_are_passed_on_and_not_recorded(setup: Setup) -> None:
    before = len(exchanges_in(setup.capture))

    for path in ("/v1/models", "/health", "/metrics", "/v1/messages/count_tokens", "/v1/threads/t1/messages"):
        assert http().post(setup.proxy.url + path, content=b"{}").json()["target"] == f"{path}?"

    setup.new(lambda: http().post(f"{setup.proxy.url}/v1/completions", json={"prompt": "x"}))
    assert len(exchanges_in(setup.capture)) == before + 1


@pytest.mark.parametrize(
    ("model", "status", "error"),
    [
        ("fails", 503, "the model is overloaded"),
        ("fails-with-200", 200, "out of memory"),
        ("no-success", 200, "nothing was done"),
    ],
)
def test_a_failure_is_recorded_as_one_whatever_its_status(setup: Setup, model: str, status: int, error: str) -> None:
    body = {"model": model, "messages": MESSAGES}

    exchange = setup.new(lambda: http().post(f"{setup.proxy.url}/v1/chat/completions", json=body))

    assert (exchange["status"], exchange["outcome"], exchange["error"]) == (status, "failed", error)


def test_credentials_are_in_no_part_of_an_exchange(setup: Setup) -> None:
    """Not even where the server tells them, or where the client has them in its body."""

    def call() -> None:
        http().post(
            f"{setup.proxy.url}/v1/chat/completions?key={SECRET}&x=1",
            content=orjson.dumps({"model": "echoes-key", "messages": MESSAGES, "api_key": SECRET}),
            headers={"authorization": f"Bearer {SECRET}", "cookie": COOKIE, "x-api-key": SECRET},
        )

    exchange = setup.new(call)

    assert exchange["path"] == "/v1/chat/completions"
    placeholder = exchange["request"]["api_key"]
    assert re.fullmatch(r"\[secret-[0-9a-f]{8}\]", placeholder)
    assert exchange["error"] == f"bad Bearer {placeholder}"
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]
    assert exchange["problems"] == [
        "credentials were removed from the request",
        "credentials of the request stood in its path or its answer, and were removed",
    ]


def test_a_key_in_the_path_and_in_a_compressed_body_is_not_kept(setup: Setup) -> None:
    raw = gzip.compress(orjson.dumps({"model": "m", "messages": MESSAGES, "extra_headers": {"X-Api-Key": SECRET}}))

    def call() -> None:
        url = f"{setup.proxy.url}/account/{SECRET}/v1/completions"
        http().post(url, content=raw, headers={"content-encoding": "gzip"})

    exchange = setup.new(call)

    placeholder = exchange["request"]["extra_headers"]["X-Api-Key"]
    assert placeholder.startswith("[secret-")
    assert exchange["path"] == f"/account/{placeholder}/v1/completions"
    assert orjson.loads(exchange["request_raw"]) == exchange["request"]


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (b' {"model" : "m",\r\n\t"messages":[] }\n', ' {"model" : "m",\r\n\t"messages":[] }\n'),
        ('{"model": "\u2028\u0085", "n": 1.0}'.encode(), '{"model": "\u2028\u0085", "n": 1.0}'),
        (b"\xff\xfe{}", {"base64": base64.b64encode(b"\xff\xfe{}").decode()}),
        (b"", ""),
        (b"[" * 2000, "[" * 2000),
    ],
)
def test_the_bytes_of_a_request_are_kept_exactly(setup: Setup, raw: bytes, kept: object) -> None:
    exchange = setup.new(lambda: http().post(f"{setup.proxy.url}/v1/completions", content=raw))

    assert exchange["request_raw"] == kept
    assert exchange["request_bytes"] == len(raw)


def test_a_request_that_came_compressed_is_kept_as_it_came_and_read(setup: Setup) -> None:
    body = {"model": "m", "messages": MESSAGES}
    raw = gzip.compress(orjson.dumps(body))

    def call() -> None:
        headers = {"content-encoding": "gzip"}
        answer = http().post(f"{setup.proxy.url}/v1/chat/completions", content=raw, headers=headers)
        assert answer.status_code == 200

    exchange = setup.new(call)

    assert base64.b64decode(exchange["request_raw"]["base64"]) == raw
    assert exchange["request"] == body


def test_a_compressed_stream_is_read(setup: Setup) -> None:
    body = {"model": "gzip", "stream": True, "messages": MESSAGES}

    exchange = setup.new(lambda: http().post(f"{setup.proxy.url}/v1/chat/completions", json=body))

    assert answer_of(exchange) == (TEXT, "stop")
    assert exchange["answer_headers"]["content-encoding"] == "gzip"


def test_the_first_line_says_what_was_recorded(setup: Setup) -> None:
    header = lines_of(setup.capture)[0]

    assert header["kvaudit_capture"] == 1
    assert header["upstream"] == f"http://{setup.service}"


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"session_id": "s", "user": "u"}, "s"),
        ({"metadata": {"session_id": "s", "user_id": "u"}}, "s"),
        ({"metadata": {"user_id": "u"}}, "u"),
        ({"conversation": {"id": "c"}, "user": "u"}, "c"),
        ({"conversation": "c"}, "c"),
        ({"user": ""}, None),
        ({"user": 7, "metadata": "x"}, None),
        (None, None),
    ],
)
def test_a_session_is_what_the_request_names(body: dict[str, Any] | None, session: str | None) -> None:
    assert session_of(body) == session


def exchange_with(limit: int = 10**6, headers: list[tuple[bytes, bytes]] | None = None) -> Exchange:
    api = api_of("POST", "/v1/chat/completions")
    assert api is not None
    return Exchange(api, "/v1/chat/completions", headers or [], b"", limit)


def told(exchange: Exchange) -> dict[str, Any]:
    exchange.end("complete")
    line = exchange.line("r1-1")
    assert line.count(b"\n") == 1
    return orjson.loads(line)  # type: ignore[no-any-return]


def test_a_request_beyond_the_limit_is_recorded_without_its_body() -> None:
    exchange = exchange_with(limit=10)
    for _ in range(5):
        exchange.add_request(b"12345")
    assert exchange.kept_bytes == 0

    line = told(exchange)

    assert (line["request"], line["request_raw"], line["request_bytes"]) == (None, None, 25)
    assert line["problems"] == ["the request is larger than 10 bytes"]


def test_an_encoding_that_nobody_undoes_is_told() -> None:
    exchange = exchange_with()
    exchange.begin_answer(200, [(b"content-type", b"text/event-stream"), (b"content-encoding", b"compress")])
    exchange.add_answer(b"\x1f\x9d", 1.0)

    line = told(exchange)

    assert line["outcome"] == "complete"
    assert line["problems"][0] == "the answer's encoding compress is not known here"


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_damaged_answers_do_not_stop_the_traffic(kind: bytes) -> None:
    exchange = exchange_with()
    exchange.begin_answer(200, [(b"content-type", kind), (b"content-encoding", b"gzip")])
    exchange.add_answer(b"no gzip", 1.0)
    exchange.add_answer(b"nor is this", 2.0)

    assert any("cannot be read" in problem for problem in told(exchange)["problems"])
    assert exchange.answer_unread


def test_a_request_that_is_nested_beyond_measure_is_kept_as_it_came() -> None:
    raw = b'{"a":' * 400 + b"1" + b"}" * 400
    exchange = exchange_with()
    exchange.add_request(raw)

    line = told(exchange)

    assert (line["request_raw"], line["request"]) == (raw.decode(), None)


def test_short_placeholders_are_no_secrets() -> None:
    exchange = exchange_with(headers=[(b"authorization", b"Bearer EMPTY")])
    exchange.add_request(b'{"text": "EMPTY"}')

    assert told(exchange)["request"] == {"text": "EMPTY"}
