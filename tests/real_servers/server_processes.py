"""Real servers as processes of their own, on loopback, for as long as a block runs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

LLAMACPP = """
import json, sys, threading
import xllamacpp

parameters = xllamacpp.CommonParams()
for name, value in json.loads(sys.argv[1]).items():
    *path, last = name.split(".")
    owner = parameters
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, value)
parameters.hostnames = ["127.0.0.1"]
server = xllamacpp.Server(parameters)
threading.Event().wait()
"""
"""llama.cpp's own HTTP server, as the wheel of xllamacpp carries it. Takes parameters of llama.cpp by their names."""
_START_SECONDS = 900.0
_STOP_SECONDS = 30.0


@contextmanager
def running(
    arguments: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address up to /v1 of a Python process that serves at `port`. It ends with the block, and all it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            start_new_session=True,
        )
        try:
            _wait_until_ready(process, port, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _stop(process)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the server did not come up:\n{log.read_text(errors='replace')[-4000:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            return
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
