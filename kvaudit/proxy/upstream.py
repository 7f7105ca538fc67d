"""The server behind the proxy: where it is, and requests to it whose every byte is the client's."""

from __future__ import annotations

import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx

from kvaudit.errors import UsageError
from kvaudit.proxy.secrets import Secrets

_CONNECT_SECONDS = 30.0
_IDLE_SECONDS = 2.0
"""Shorter than servers keep idle connections (5 s at uvicorn), so that no request meets a closing one."""

_TIMEOUTS = {"connect": _CONNECT_SECONDS, "read": None, "write": None, "pool": None}


class Upstream:
    """Connections to one server: as many as there are requests, kept open while they are used.

    Each is a transport of its own: a pool of httpx takes, for a request, time that grows with the square of the number
    of its connections.
    """

    def __init__(self, url: httpx.URL, verify: ssl.SSLContext) -> None:
        self.name = Secrets((), b"", url.path).removed(str(url))
        self._url = url.copy_with(path="/")
        self._prefix = url.raw_path.rstrip(b"/")
        self._host = url.netloc
        self._verify = verify
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()

    async def prepare(self) -> None:
        """Load what the first request would wait for otherwise, and its times with it."""
        self._idle.append((time.monotonic(), self._connection()))
        await anyio.sleep(0)

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop()[1].aclose()

    @asynccontextmanager
    async def answer(
        self, method: str, target: bytes, headers: list[tuple[bytes, bytes]], body: AsyncIterator[bytes]
    ) -> AsyncIterator[httpx.Response]:
        """The answer: status, headers, and a body (`chunks`) to read before the block ends, or to cut off with it.

        Nothing is added to the request but the host, nothing is followed or decoded. Raises httpx.TransportError where
        the server cannot be reached or goes away.
        """
        whole = self._prefix + target if target.startswith(b"/") else target
        request = httpx.Request(
            method,
            self._url,
            headers=[(b"host", self._host), *headers],
            stream=_Body(body),
            extensions={"target": whole, "timeout": _TIMEOUTS},
        )
        transport = self._idle.pop()[1] if self._idle else self._connection()
        try:
            response = await transport.handle_async_request(request)
            try:
                yield response
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await transport.aclose()
            raise
        self._idle.append((time.monotonic(), transport))
        await self._close_unused()

    async def _close_unused(self) -> None:
        before = time.monotonic() - _IDLE_SECONDS
        while self._idle and self._idle[0][0] < before:
            await self._idle.popleft()[1].aclose()

    def _connection(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_IDLE_SECONDS)
        return httpx.AsyncHTTPTransport(verify=self._verify, limits=limits)


def chunks(response: httpx.Response) -> httpx.AsyncByteStream:
    """The body of an answer as it comes, still encoded."""
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return response.stream


class _Body(httpx.AsyncByteStream):
    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks


def upstream_url(text: str) -> httpx.URL:
    """`http://HOST:PORT` or https, perhaps with a path that goes before every request's. Raises UsageError."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UsageError(f"{text!r} is not a URL: {error}", "write --upstream http://HOST:PORT") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(f"{text!r} is not the address of a server", "write --upstream http://HOST:PORT")
    if url.userinfo:
        raise UsageError("--upstream holds a password", "let clients send their own credentials: they are passed on")
    if url.query or url.fragment:
        raise UsageError(f"{text!r} has more than a path", "take the query and fragment away")
    return url


def certificates(*, insecure: bool, authority: Path | None) -> ssl.SSLContext:
    """How the server's certificate is checked. `authority`: PEM certificates that are trusted in place of the public
    ones. Raises UsageError for a file that holds none.
    """
    if insecure and authority is not None:
        raise UsageError("--insecure checks no certificate, --ca checks one", "give one of them")
    if authority is None:
        return httpx.create_ssl_context(verify=not insecure)
    try:
        return ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"{authority} holds no certificates: {error.strerror or error}", "give a PEM file") from error
