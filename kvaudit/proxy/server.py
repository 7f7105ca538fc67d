"""The reverse proxy: bytes in, the same bytes out, each chunk at once; a copy goes to the recording."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import anyio
import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from kvaudit.proxy.exchange import Exchange, Outcome
from kvaudit.proxy.recording import Recording
from kvaudit.proxy.secrets import Secrets
from kvaudit.proxy.upstream import Upstream, chunks
from kvaudit.reports.escape import visible

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_HIGHEST_STATUS = 599

_Headers = list[tuple[bytes, bytes]]


class Proxy:
    """An ASGI application. `say` tells the operator of faults of the proxy's own."""

    def __init__(self, upstream: Upstream, recording: Recording, say: Callable[[str], None]) -> None:
        self._upstream, self._recording, self._say = upstream, recording, say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._recording.refuses:
            refusal = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the recording proxy cannot record (--strict)")
            await refusal(scope, receive, send)
            return
        exchange = self._recording.begin(scope["method"], scope["path"], scope["headers"], scope["query_string"])
        relay = _Relay(self._upstream, Request(scope, receive), receive, send, exchange)
        try:
            await relay.run()
        except asyncio.CancelledError:
            relay.end("stopped", "the proxy was stopped")
            raise
        except ExceptionGroup as group:
            told = f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}"
            relay.end("upstream-gone", told)
            secrets = Secrets(scope["headers"], scope["query_string"], scope["path"])
            self._say(visible(secrets.removed(f"a request to {scope['path']} failed in the proxy: {told}")))
            raise
        finally:
            if exchange is not None:
                self._recording.add(exchange)


@dataclass(slots=True)
class _Relay:
    """One request and its answer on their way."""

    upstream: Upstream
    request: Request
    receive: Receive
    send: Send
    exchange: Exchange | None
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more of the request will be read from the client."""
    begun: bool = False
    """The server has begun to answer."""
    ended: bool = False

    def end(self, outcome: Outcome, error: str | None = None) -> None:
        self.ended = True
        if self.exchange is not None:
            self.exchange.end(outcome, error)

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_client, tasks.cancel_scope)
            await self._forward()
            tasks.cancel_scope.cancel()

    async def _watch_client(self, relaying: anyio.CancelScope) -> None:
        """A client that goes away takes its upstream request along."""
        await self.sent.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not self.ended:
            self.end("client-gone", "the client went away")
            relaying.cancel()

    async def _forward(self) -> None:
        scope = self.request.scope
        try:
            async with self.upstream.answer(
                self.request.method, _target(scope), _forwarded(scope["headers"]), self._body()
            ) as response:
                self.sent.set()  # whether or not the server wanted all of the request
                self.begun = True
                await self._answer(response)
        except ClientDisconnect:
            self.end("client-gone", "the client went away while it sent the request")
        except httpx.TransportError as error:
            if self.begun:
                self.end("upstream-gone", f"the server ended the answer before its end: {error}")
            else:
                await self._keep_what_nobody_took()
                await self._tell_unreachable(error)

    async def _keep_what_nobody_took(self) -> None:
        """The request is recorded whole also where no server came to read it."""
        if not self.sent.is_set():
            with suppress(ClientDisconnect):
                async for _ in self._body():
                    pass

    async def _body(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self.request.stream():
                if chunk:
                    if self.exchange is not None:
                        self.exchange.add_request(chunk)
                    yield chunk
        finally:
            self.sent.set()

    async def _answer(self, response: httpx.Response) -> None:
        """Leaves the client's answer without an end where the server's has none."""
        headers = _passed_on(response.headers.raw)
        exchange = self.exchange
        if exchange is not None:
            exchange.begin_answer(response.status_code, headers)
        if response.status_code > _HIGHEST_STATUS:
            told = f"{self.upstream.name} answered with status {response.status_code}, which HTTP does not have"
            self.end("failed", told)
            await _refusal(HTTPStatus.BAD_GATEWAY, told)(self.request.scope, self.receive, self.send)
            return
        await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        async for chunk in chunks(response):
            came = exchange.elapsed_ms() if exchange is not None else 0.0
            await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
            if exchange is not None:  # after the client has it
                exchange.add_answer(chunk, came)
        self.end("complete")
        await self.send({"type": "http.response.body", "body": b""})

    async def _tell_unreachable(self, error: httpx.TransportError) -> None:
        told = f"no answer from {self.upstream.name}: {str(error) or type(error).__name__}"
        self.end("unreachable", told)
        await _refusal(HTTPStatus.BAD_GATEWAY, told)(self.request.scope, self.receive, self.send)


def _refusal(status: HTTPStatus, message: str) -> JSONResponse:
    """An error in the form that OpenAI's clients show."""
    error = {"message": f"kvaudit: {message}", "type": "proxy_error", "param": None, "code": status.phrase}
    return JSONResponse({"error": error}, status.value)


def _target(scope: Scope) -> bytes:
    """Path and query as the client wrote them."""
    path: bytes = scope["raw_path"]
    if path[:1] not in (b"/", b"*"):  # the absolute form, in which clients of forward proxies ask
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> _Headers:
    """A request's headers; a body without a length stays one."""
    given = list(headers)
    chunked = any(name == b"transfer-encoding" for name, _ in given)
    kept = [(name, value) for name, value in _passed_on(given) if name != b"host"]
    return [*kept, (b"transfer-encoding", b"chunked")] if chunked else kept


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> _Headers:
    """All headers but those that belong to one connection, and those that it names."""
    given = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in given if name == b"connection" for token in value.split(b",")}
    if any(name == b"transfer-encoding" for name, _ in given):
        named.add(b"content-length")
    return [(name, value) for name, value in given if name not in _HOP_BY_HOP and name not in named]
