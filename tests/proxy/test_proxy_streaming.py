"""Chunks go on at once; what breaks off breaks off on both sides, and is recorded as such."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import pytest
from proxy_processes import ProxyProcess, eventually, exchanges_in, http, running_proxy, running_service, talk


@dataclass(frozen=True)
class Setup:
    service: str
    proxy: ProxyProcess
    capture: Path

    def control(self, what: str = "state") -> dict[str, int]:
        return http().get(f"http://{self.service}/control/{what}").json()  # type: ignore[no-any-return]

    def last_exchange(self, before: int) -> dict[str, object]:
        eventually(lambda: len(exchanges_in(self.capture)) > before)
        return exchanges_in(self.capture)[-1]

    def count(self) -> int:
        return len(exchanges_in(self.capture))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    capture = tmp_path_factory.mktemp("streaming") / "capture.jsonl.zst"
    with running_service() as service, running_proxy(f"http://{service}", capture) as proxy:
        yield Setup(service, proxy, capture)


def chat(model: str) -> dict[str, object]:
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}


def raw_chat(model: str) -> bytes:
    body = orjson.dumps(chat(model))
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_the_first_chunk_is_there_before_the_server_sends_the_last(setup: Setup) -> None:
    before = setup.count()
    with http().stream("POST", f"{setup.proxy.url}/v1/chat/completions", json=chat("gated"), timeout=8) as response:
        chunks = response.iter_raw()
        seen = next(chunks)
        while b"[DONE]" not in seen and b'"stop"' not in seen:
            seen += next(chunks)  # times out where the proxy waits for more than the server has sent
        assert b"[DONE]" not in seen
        setup.control("open")
        assert b"[DONE]" in b"".join(chunks)

    exchange = setup.last_exchange(before)
    assert exchange["outcome"] == "complete"
    assert 0 < exchange["ttft_ms"] < exchange["total_ms"]  # type: ignore[operator]


def test_small_answers_do_not_wait_for_acknowledgements(setup: Setup) -> None:
    """Head and body of an answer are two packets, which Nagle's delay holds 40 ms apart on a connection used again."""
    before, took = setup.count(), []
    with httpx.Client(base_url=setup.proxy.url) as client:
        for _ in range(20):
            began = time.perf_counter()
            client.post("/v1/completions", json={"prompt": "x"})
            took.append(time.perf_counter() - began)

    eventually(lambda: setup.count() == before + 20)
    assert min(took[10:]) < 0.03


def test_times_are_those_of_the_content(setup: Setup) -> None:
    """The first chunks of this stream hold none: a comment, no choices, a role."""
    before = setup.count()

    http().post(f"{setup.proxy.url}/v1/chat/completions", json=chat("slow"), timeout=20)

    exchange = setup.last_exchange(before)
    assert exchange["ttft_ms"] > 550  # type: ignore[operator]
    assert exchange["total_ms"] > exchange["ttft_ms"] + 700  # type: ignore[operator]


def test_a_client_that_goes_away_cancels_the_upstream_request(setup: Setup) -> None:
    before, cut = setup.count(), setup.control()["cut"]
    with http().stream("POST", f"{setup.proxy.url}/v1/chat/completions", json=chat("endless")) as response:
        next(response.iter_raw())

    exchange = setup.last_exchange(before)
    assert (exchange["outcome"], exchange["status"]) == ("client-gone", 200)
    eventually(lambda: setup.control()["cut"] > cut)


def test_a_client_that_goes_away_before_any_answer_cancels_the_upstream_request(setup: Setup) -> None:
    before, cut = setup.count(), setup.control()["cut"]
    with pytest.raises(httpx.ReadTimeout):
        http().post(f"{setup.proxy.url}/v1/chat/completions", json=chat("never"), timeout=0.5)

    exchange = setup.last_exchange(before)
    assert (exchange["outcome"], exchange["status"]) == ("client-gone", None)
    assert exchange["request"] == chat("never")
    eventually(lambda: setup.control()["cut"] > cut)


def test_a_client_that_goes_away_within_its_request_is_recorded(setup: Setup) -> None:
    before = setup.count()
    host, port = setup.proxy.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(raw_chat("x")[:-5])
        time.sleep(0.2)

    exchange = setup.last_exchange(before)
    assert (exchange["outcome"], exchange["request"]) == ("client-gone", None)
    assert raw_chat("x").endswith(str(exchange["request_raw"]).encode() + raw_chat("x")[-5:])


def test_a_server_that_breaks_off_is_seen_by_the_client_and_recorded(setup: Setup) -> None:
    before = setup.count()

    said = talk(setup.proxy.address, raw_chat("broken"))

    assert b"The " in said
    assert not said.endswith(b"0\r\n\r\n")
    exchange = setup.last_exchange(before)
    assert exchange["outcome"] == "upstream-gone"
    assert "The " in str(exchange["answer"])


def test_a_stream_without_its_end_mark_is_recorded_as_cut_short(setup: Setup) -> None:
    before = setup.count()

    assert http().post(f"{setup.proxy.url}/v1/chat/completions", json=chat("no-end")).status_code == 200

    assert setup.last_exchange(before)["outcome"] == "cut-short"


def test_a_client_that_does_not_read_holds_the_server_back(setup: Setup) -> None:
    before, memory = setup.count(), setup.proxy.resident_bytes()
    host, port = setup.proxy.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(raw_chat("flood"))
        connection.recv(1000)
        eventually(lambda: setup.control()["sent"] > 1 << 20)
        last = -1
        while (sent := setup.control()["sent"]) != last:
            last = sent
            time.sleep(0.3)
        grown = setup.proxy.resident_bytes() - memory

    assert sent < 40 << 20  # of 79 MB; the rest of it is in the buffers of four sockets
    assert grown < 40 << 20
    assert setup.last_exchange(before)["outcome"] == "client-gone"


def test_an_answer_beyond_the_limit_passes_and_is_recorded_without_its_rest(setup: Setup) -> None:
    before, memory = setup.count(), setup.proxy.resident_bytes()

    with http().stream("POST", f"{setup.proxy.url}/v1/chat/completions", json=chat("flood"), timeout=60) as response:
        size = sum(map(len, response.iter_raw()))

    exchange = setup.last_exchange(before)
    assert size == exchange["answer_bytes"] > 70 << 20
    assert any("larger than" in problem for problem in exchange["problems"])  # type: ignore[attr-defined]
    assert exchange["outcome"] == "complete"
    assert setup.proxy.resident_bytes() - memory < 250 << 20


def test_a_server_that_is_not_there_is_told_in_the_form_of_the_api(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        upstream = f"http://127.0.0.1:{taken.getsockname()[1]}"
    capture = tmp_path / "capture.jsonl"
    with running_proxy(upstream, capture) as proxy:
        answer = http().post(f"{proxy.url}/v1/chat/completions", json=chat("x"))
        assert proxy.stop() == 0

    assert answer.status_code == 502
    assert upstream in answer.json()["error"]["message"]
    (exchange,) = exchanges_in(capture)
    assert (exchange["outcome"], exchange["status"]) == ("unreachable", None)
    assert (exchange["request"]["model"], exchange["problems"]) == ("x", [])
    assert "1 unreachable" in proxy.stderr
