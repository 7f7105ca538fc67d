"""Servers that are odd, played by the test with a plain socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from proxy_processes import ProxyProcess, eventually, exchanges_in, running_proxy

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
NUMBERS = count(1000)


@dataclass
class Between:
    """The proxy, with the test on both of its sides."""

    listener: socket.socket
    proxy: ProxyProcess
    capture: Path

    def client(self) -> socket.socket:
        host, port = self.proxy.address.split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def server(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(10)
        return connection


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Between]:
    capture = tmp_path_factory.mktemp("odd") / "capture.jsonl"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        upstream = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with running_proxy(upstream, capture) as proxy:
            yield Between(listener, proxy, capture)


def read_until(connection: socket.socket, end: bytes) -> bytes:
    said = b""
    while end not in said:
        piece = connection.recv(1 << 16)
        assert piece, said
        said += piece
    return said


def rest(connection: socket.socket) -> bytes:
    said = b""
    while piece := connection.recv(1 << 16):
        said += piece
    return said


def said_to_client(between: Between, answer: bytes) -> tuple[bytes, dict[str, Any]]:
    """What the client gets, and what is recorded."""
    prompt = str(next(NUMBERS))
    with between.client() as client:
        client.sendall(HEAD + b'content-length: 17\r\n\r\n{"prompt":"%b"}' % prompt.encode())
        with between.server() as server:
            read_until(server, b"}")
            server.sendall(answer)
        said = rest(client)
    return said, eventually(lambda: [e for e in exchanges_in(between.capture) if e["request"] == {"prompt": prompt}])[0]


def test_a_body_goes_on_while_it_comes(between: Between) -> None:
    with between.client() as client:
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n")
        with between.server() as server:
            read_until(server, b"one")
            client.sendall(b"3\r\ntwo\r\n0\r\n\r\n")
            read_until(server, b"0\r\n\r\n")
            server.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            assert rest(client).endswith(b"\r\n\r\nok")


def test_a_body_that_ends_with_its_connection_is_passed_on_whole(between: Between) -> None:
    said, _ = said_to_client(between, b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end")

    assert b"\r\nd\r\nuntil the end\r\n0\r\n\r\n" in said


def test_hints_before_an_answer_do_no_harm(between: Between) -> None:
    said, _ = said_to_client(
        between, b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 1\r\n\r\nx"
    )

    assert said.startswith(b"HTTP/1.1 201 Created\r\n")


def test_an_answer_before_the_end_of_the_request_reaches_the_client(between: Between) -> None:
    with between.client() as client:
        client.sendall(HEAD + b"content-length: 200000\r\n\r\n" + bytes(100000))
        with between.server() as server:
            read_until(server, b"\r\n\r\n")
            server.sendall(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig")
            server.shutdown(socket.SHUT_WR)
            client.sendall(bytes(100000))
            assert rest(client).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\ncontent-len"])
def test_what_is_no_answer_is_a_bad_gateway(between: Between, answer: bytes) -> None:
    said, exchange = said_to_client(between, answer)

    assert said.startswith(b"HTTP/1.1 502")
    assert b"proxy_error" in said
    assert exchange["outcome"] == "unreachable"


def test_an_answer_shorter_than_it_said_is_shorter_for_the_client_too(between: Between) -> None:
    said, exchange = said_to_client(between, b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort")

    assert said.endswith(b"\r\n\r\nshort")
    assert exchange["outcome"] == "upstream-gone"


@pytest.mark.parametrize("status", [600, 999])
def test_a_status_that_http_does_not_have_is_a_bad_gateway(between: Between, status: int) -> None:
    said, exchange = said_to_client(between, b"HTTP/1.1 %d Odd\r\ncontent-length: 2\r\n\r\nok" % status)

    assert said.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert b"answered with status %d, which HTTP does not have" % status in said
    assert (exchange["status"], exchange["outcome"]) == (status, "failed")
    assert said_to_client(between, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")[0].endswith(b"ok")
