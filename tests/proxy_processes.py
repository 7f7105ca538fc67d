"""A server and the proxy before it, as processes, and what tests do with them."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import orjson

from kvaudit.errors import TraceError
from kvaudit.traces.source import TraceSource

SERVICE = Path(__file__).with_name("proxy_service.py")
PATIENCE = 30.0


def eventually(happens: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """What `happens` gives once it gives something."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := happens():
            return found
        time.sleep(0.02)
    raise AssertionError(f"did not happen within {seconds} s")


@contextmanager
def running_service(*certificate_and_key: Path, port: str = "0") -> Iterator[str]:
    """The server's HOST:PORT."""
    command = [sys.executable, str(SERVICE), port, *map(str, certificate_and_key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


@dataclass
class ProxyProcess:
    process: subprocess.Popen[bytes]
    log: Path
    address: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def stderr(self) -> str:
        return self.log.read_text()

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def processor_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()


@contextmanager
def running_proxy(
    upstream: str, capture: Path, *options: str, largest_file: int | None = None
) -> Iterator[ProxyProcess]:
    """`largest_file`: the bytes behind which the system refuses to write, as a full disk does."""
    log = capture.with_name(f"{capture.name}.{time.monotonic_ns()}.log")
    command = [sys.executable, "-m", "kvaudit", "record", "proxy", "--upstream", upstream, "-o", str(capture)]

    def limited() -> None:
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", *options],
            stderr=stderr,
            preexec_fn=limited,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )
    proxy = ProxyProcess(process, log)
    try:
        started = eventually(lambda: re.search(r"recording http://(\S+) ->", proxy.stderr) or process.poll())
        assert not isinstance(started, int), proxy.stderr
        proxy.address = started[1]
        yield proxy
    finally:
        process.kill()
        process.wait()


def lines_of(capture: Path) -> list[dict[str, Any]]:
    """Every whole line of a capture."""
    found = []
    try:
        for _, line in TraceSource(str(capture), capture).lines():
            found.append(orjson.loads(line))
    except TraceError:
        pass
    except orjson.JSONDecodeError:
        assert not line.endswith(b"\n")
    return found


def exchanges_in(capture: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(capture) if "exchange" in line]


def recorded(capture: Path, count: int) -> list[dict[str, Any]]:
    """The exchanges of a capture once there are so many: they are written after clients have their answers."""
    eventually(lambda: len(exchanges_in(capture)) >= count)
    found = exchanges_in(capture)
    assert len(found) == count
    return found


@cache
def http() -> httpx.Client:
    """One client for all tests: reading the certificates of the world takes longer than most of them."""
    return httpx.Client(timeout=PATIENCE, limits=httpx.Limits(max_keepalive_connections=0))


def talk(address: str, sent: bytes) -> bytes:
    """Everything that a server says to these bytes until it ends the connection."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        said = b""
        while piece := connection.recv(1 << 16):
            said += piece
    return said
