"""The proxy changes nothing: what a server gets and says is the same with and without it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import h11
import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_processes import exchanges_in, running_proxy, running_service, talk

CONNECTION_HEADERS = {b"connection", b"transfer-encoding", b"keep-alive"}


@dataclass(frozen=True)
class Addresses:
    direct: str
    proxied: str
    capture: Path


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    capture = tmp_path_factory.mktemp("transparency") / "capture.jsonl"
    with running_service() as service, running_proxy(f"http://{service}", capture) as proxy:
        yield Addresses(service, proxy.address, capture)


def request(
    target: bytes,
    method: bytes = b"POST",
    headers: list[tuple[bytes, bytes]] | None = None,
    body: bytes = b"",
    chunks: list[bytes] | None = None,
) -> bytes:
    """With `chunks` the body goes in chunks, else with its length."""
    framing = [(b"transfer-encoding", b"chunked")] if chunks else [(b"content-length", b"%d" % len(body))]
    if not chunks and not body:
        framing = []
    lines = [(b"host", b"x"), (b"connection", b"close"), *framing, *(headers or [])]
    head = method + b" " + target + b" HTTP/1.1\r\n" + b"".join(name + b": " + value + b"\r\n" for name, value in lines)
    if chunks:
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return head + b"\r\n" + body


def answer(address: str, sent: bytes, method: bytes = b"POST") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers but those of the connection, and body with its chunks undone."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(talk(address, sent))
    connection.receive_data(b"")
    response = connection.next_event()
    assert isinstance(response, h11.Response)
    body = b""
    while isinstance(event := connection.next_event(), h11.Data):
        body += event.data
    headers = [(name, value) for name, value in response.headers if name not in CONNECTION_HEADERS]
    return response.status_code, headers, body


def assert_same(addresses: Addresses, sent: bytes, method: bytes = b"POST") -> tuple[int, bytes]:
    told = answer(addresses.proxied, sent, method)
    assert told == answer(addresses.direct, sent, method)
    return told[0], told[2]


printable = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
targets = st.text(printable, max_size=30).map(lambda text: b"/" + text.replace("?", "%3F").encode())
queries = st.text(printable, min_size=1, max_size=30).map(lambda text: b"?" + text.encode())
names = st.sampled_from([b"x-a", b"X-B", b"accept-encoding", b"cookie", b"authorization", b"x-a", b"user-agent"])
values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=20).map(str.encode)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"PROPFIND"]),
    target=targets,
    query=st.one_of(st.just(b""), queries),
    headers=st.lists(st.tuples(names, values), max_size=5),
    body=st.binary(max_size=200),
    chunks=st.one_of(st.none(), st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4)),
)
def test_any_request_is_passed_on_and_answered_alike(
    addresses: Addresses,
    method: bytes,
    target: bytes,
    query: bytes,
    headers: list[tuple[bytes, bytes]],
    body: bytes,
    chunks: list[bytes] | None,
) -> None:
    assert_same(addresses, request(b"/any" + target + query, method, headers, body, chunks), method)


@pytest.mark.parametrize(
    "target", [b"/a/../b//c/./d", b"/%7e%2F%00?x=%zz&y=a+b", b"/x?q=\"<>{}|^`'[]", b"/x?a=1?b=2", b"/x#no"]
)
def test_odd_targets_reach_the_server_as_they_were_written(addresses: Addresses, target: bytes) -> None:
    _, body = assert_same(addresses, request(target, b"GET"), b"GET")

    assert orjson.loads(body)["target"].rstrip("?").encode() == target


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        (b"HEAD", b"/v1/models", 200),
        (b"OPTIONS", b"*", 404),
        (b"GET", b"/redirect", 307),
        (b"GET", b"/nothing", 204),
        (b"GET", b"/unchanged", 304),
        (b"POST", b"/v1/messages/count_tokens", 200),
        (b"GET", b"/v1/chat/completions", 200),
    ],
)
def test_answers_of_every_kind_are_passed_on(addresses: Addresses, method: bytes, path: bytes, status: int) -> None:
    told, _ = assert_same(addresses, request(path, method), method)

    assert told == status


@pytest.mark.parametrize("name", [b"x-mine", b"keep-alive", b"te", b"upgrade", b"proxy-authorization"])
def test_headers_of_the_connection_stay_with_it(addresses: Addresses, name: bytes) -> None:
    sent = request(b"/x", b"GET", [(b"connection", b"close, x-mine"), (name, b"here")])

    _, _, body = answer(addresses.proxied, sent.replace(b"connection: close\r\n", b"", 1), b"GET")

    assert name.decode() not in [header for header, _ in orjson.loads(body)["headers"]]


def test_a_client_that_asks_for_the_whole_url_gets_what_it_asked_for(addresses: Addresses) -> None:
    _, _, body = answer(addresses.proxied, request(b"http://elsewhere.example/v1/x?y=1", b"GET"), b"GET")

    assert orjson.loads(body)["target"] == "/v1/x?y=1"


@pytest.mark.parametrize("model", ["x", "gzip", "fails", "fails-with-200", "paced"])
@pytest.mark.parametrize("stream", [True, False])
def test_recorded_exchanges_are_passed_on_alike(addresses: Addresses, model: str, stream: bool) -> None:
    body = b' {"model": "%b",\n "stream": %b, "messages": [ ]}' % (model.encode(), b"true" if stream else b"false")
    before = len(exchanges_in(addresses.capture))

    assert_same(addresses, request(b"/v1/chat/completions?k=v", body=body))
    assert_same(addresses, request(b"/v1/chat/completions", chunks=[body[:7], body[7:]]))

    assert len(exchanges_in(addresses.capture)) >= before


def test_a_path_of_the_upstream_goes_before_every_path(tmp_path: Path) -> None:
    with (
        running_service() as service,
        running_proxy(f"http://{service}/behind/here/", tmp_path / "capture.jsonl") as proxy,
    ):
        _, _, body = answer(proxy.address, request(b"/v1/models?x=1", b"GET"), b"GET")

    assert orjson.loads(body)["target"] == "/behind/here/v1/models?x=1"


def test_a_client_that_waits_for_the_go_ahead_gets_it(addresses: Addresses) -> None:
    head, _, body = request(b"/x", headers=[(b"expect", b"100-continue")], body=b"one").partition(b"\r\n\r\n")
    host, port = addresses.proxied.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert connection.recv(10000).startswith(b"HTTP/1.1 200")


def test_many_requests_share_a_connection(addresses: Addresses) -> None:
    with httpx.Client(base_url=f"http://{addresses.proxied}") as client:
        connections = {
            client.post("/x", content=b"%d" % number).extensions["network_stream"].get_extra_info("client_addr")
            for number in range(20)
        }

    assert len(connections) == 1


def test_what_is_no_http_ends_in_400_and_harms_nobody(addresses: Addresses) -> None:
    assert talk(addresses.proxied, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    assert_same(addresses, request(b"/x", b"GET"), b"GET")


def test_a_server_that_came_back_is_found_at_once(tmp_path: Path) -> None:
    """No request is sent into a connection that the old server has closed."""
    with ExitStack() as proxies:
        with running_service() as service:
            proxy = proxies.enter_context(running_proxy(f"http://{service}", tmp_path / "capture.jsonl"))
            assert answer(proxy.address, request(b"/x"))[0] == 200
        with running_service(port=service.partition(":")[2]) as again:
            assert again == service
            assert answer(proxy.address, request(b"/x"))[0] == 200
