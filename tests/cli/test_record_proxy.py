"""`kvaudit record proxy`, as an operator runs it."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from proxy_processes import eventually, exchanges_in, http, running_proxy, running_service
from typer.testing import CliRunner, Result

from kvaudit.cli import app
from kvaudit.errors import KvauditError
from kvaudit.traces import read_trace


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with running_service() as address:
        yield f"http://{address}"


def kvaudit(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def ask(url: str, text: str, model: str = "m") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": model != "m", "max_tokens": 8}
    return http().post(f"{url}/v1/chat/completions", json=body)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_what_it_does_what_it_did_and_what_is_next(service: str, tmp_path: Path, number: int) -> None:
    capture = tmp_path / "my capture.jsonl.zst"
    with running_proxy(service, capture) as proxy:
        ask(proxy.url, "one")
        ask(proxy.url, "two", "fails")
        http().get(f"{proxy.url}/v1/models")
        assert proxy.stop(number) == 0

    lines = proxy.stderr.splitlines()
    trace = tmp_path / "my capture-trace.jsonl.gz"
    assert lines == [
        f"recording {proxy.url} -> {service} to {capture}; Ctrl-C ends it",
        "recorded 2 exchanges, 1 failed; passed on 1 other request",
        f"next: kvaudit record import '{capture}' -o '{trace}'",
    ]

    imported = kvaudit(*shlex.split(lines[-1])[2:])
    assert imported.exit_code == 0
    assert imported.exit_code == 0
    assert [request.segments[0].text for request in read_trace(trace).requests] == ["one"]


def test_what_is_under_way_finishes_when_it_is_stopped(service: str, tmp_path: Path) -> None:
    capture = tmp_path / "capture.jsonl"
    with running_proxy(service, capture) as proxy:
        body = {"model": "slow", "stream": True, "messages": []}
        with http().stream("POST", f"{proxy.url}/v1/chat/completions", json=body) as response:
            chunks = response.iter_raw()
            next(chunks)
            proxy.process.send_signal(signal.SIGTERM)
            assert b"[DONE]" in b"".join(chunks)
        assert proxy.process.wait(20) == 0

    assert [exchange["outcome"] for exchange in exchanges_in(capture)] == ["complete"]


@pytest.mark.slow
def test_what_does_not_finish_is_recorded_as_stopped(service: str, tmp_path: Path) -> None:
    capture = tmp_path / "capture.jsonl"
    with running_proxy(service, capture) as proxy:
        body = {"model": "endless", "stream": True, "messages": []}
        with http().stream("POST", f"{proxy.url}/v1/chat/completions", json=body) as response:
            chunks = response.iter_raw()
            next(chunks)
            proxy.process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                b"".join(chunks)
        assert proxy.process.wait(20) == 0

    (exchange,) = exchanges_in(capture)
    assert exchange["outcome"] == "stopped"
    assert "The " in exchange["answer"]["choices"][0]["text"]


def test_an_operator_learns_which_flags_tell_cached_tokens(service: str, tmp_path: Path) -> None:
    with running_proxy(service, tmp_path / "capture.jsonl") as proxy:
        http().post(f"{proxy.url}/v1/completions", json={"prompt": "x", "stream": True})
        proxy.stop()

    assert "--enable-prompt-tokens-details" in proxy.stderr


def test_listening_for_everyone_is_said_loudly(service: str, tmp_path: Path) -> None:
    with running_proxy(service, tmp_path / "capture.jsonl", "--listen", "0.0.0.0:0") as proxy:
        eventually(lambda: "WARNING: listening on 0.0.0.0:" in proxy.stderr)
        port = re.findall(r"0\.0\.0\.0:(\d+)", proxy.stderr)[0]
        assert http().get(f"http://127.0.0.1:{port}/v1/models").status_code == 200


@pytest.mark.parametrize("address", ["8899", "localhost", "127.0.0.1:x", "127.0.0.1:70000", "http://127.0.0.1:1", ":1"])
def test_a_place_to_listen_that_is_none_is_refused(tmp_path: Path, address: str) -> None:
    output = tmp_path / "capture.jsonl"

    refused = kvaudit("record", "proxy", "--upstream", "http://x", "--listen", address, "-o", output).exception

    assert isinstance(refused, KvauditError)
    assert "--listen 127.0.0.1:8899" in str(refused)
    assert not output.exists()


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = kvaudit(
            "record", "proxy", "--upstream", "http://x", "--listen", address, "-o", tmp_path / "c"
        ).exception

    assert isinstance(refused, KvauditError)
    assert refused.exit_code == 2
    assert f"cannot listen on {address}" in refused.message


def test_help_loads_neither_server_nor_client() -> None:
    program = (
        "import sys; from kvaudit.cli import app; app(['record', 'proxy', '--help'], standalone_mode=False); "
        "print(*sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = {name.partition(".")[0] for name in out.splitlines()[-1].split()}
    assert "typer" in loaded
    assert not loaded & {"starlette", "uvicorn", "httpx", "anyio", "orjson", "zstandard", "filelock"}
