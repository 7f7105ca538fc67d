"""Runs the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from kvaudit.errors import UsageError
from kvaudit.proxy.recording import Recording
from kvaudit.proxy.server import Proxy
from kvaudit.proxy.upstream import Upstream

_SECONDS_TO_FINISH = 5
_SECONDS_TO_CANCEL = 2.0
_CLIENT_IDLE_SECONDS = 75
"""Longer than clients keep idle connections, so that none of their requests meets a closing one."""

_LARGEST_HEAD = 1 << 20
_BACKLOG = 2048


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """A socket that already takes connections at `HOST:PORT`. Raises UsageError."""
    host, port = _host_and_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        created = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error.strerror or error}", "see --listen") from error
    with socket.socket(fileno=created.detach()) as listener:  # knows its protocol: asyncio then turns Nagle's delay off
        yield listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def serve(listener: socket.socket, upstream: Upstream, recording: Recording, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; what is under way then has a few seconds to finish. A second Ctrl-C stops it."""
    config = uvicorn.Config(
        Proxy(upstream, recording, say),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_CLIENT_IDLE_SECONDS,
        timeout_graceful_shutdown=_SECONDS_TO_FINISH,
        h11_max_incomplete_event_size=_LARGEST_HEAD,
    )
    with _signals_end_serving():
        asyncio.run(_serve(uvicorn.Server(config), listener, upstream))


async def _serve(server: uvicorn.Server, listener: socket.socket, upstream: Upstream) -> None:
    await upstream.prepare()
    try:
        await server.serve(sockets=[listener])
        if left := set(server.server_state.tasks):
            await asyncio.wait(left, timeout=_SECONDS_TO_CANCEL)
    finally:
        await upstream.aclose()


@contextmanager
def _signals_end_serving() -> Iterator[None]:
    """The server raises the signal that ended it once more when it is done; then the summary is still to come."""
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _host_and_port(address: str) -> tuple[str, int]:
    matched = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})", address)
    if matched is None or int(matched["port"]) > 65535:
        raise UsageError(f"{address!r} is not HOST:PORT", "write, for instance, --listen 127.0.0.1:8899")
    return matched["v6"] or matched["host"], int(matched["port"])
