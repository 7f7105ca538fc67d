"""Emptying a server's cache: by HTTP calls whose success stands in the body, or by a command of the user's.

Variables of the environment (`$NAME`) are put in where a call is made, so that no key stands in a manifest.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os.path import expandvars
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from kvaudit.engines.server.options import ServerOptions
from kvaudit.engines.server.presets import PRESETS, Call
from kvaudit.engines.server.sending import AttemptError, Connection
from kvaudit.errors import EngineError

_PAUSE = 0.25
_NOT_OFFERED = frozenset({401, 403, 404, 405, 501})
_FAILED = frozenset({"error", "failed", "failure", "busy"})


@dataclass(slots=True)
class Resetter:
    """`is_cheap`: it may be done twice. `pause` waits that many seconds."""

    options: ServerOptions
    connection: Connection
    pause: Callable[[float], None] = time.sleep

    @property
    def is_cheap(self) -> bool:
        return self.options.reset_command is None

    def described(self) -> str:
        """What is done, for the manifest: nothing secret is in it that the user did not write."""
        if self.options.reset_command is not None:
            return f"command: {self.options.reset_command}"
        calls = ", ".join(f"{call.method} {self._url(call)}" for call in self._calls())
        return f"{self.options.reset}: {calls}" if self.options.reset else calls

    def run(self) -> None:
        """Raises EngineError where the server refuses, or is still busy when the patience ends."""
        if self.options.reset_command is not None:
            self._command(self.options.reset_command)
            return
        for call in self._calls():
            for url in self._urls(call):
                self._until_done(call.method, url)

    def _calls(self) -> tuple[Call, ...]:
        if self.options.reset is not None:
            return PRESETS[self.options.reset].calls
        return (Call(self.options.reset_method, "", elsewhere=True),)

    def _url(self, call: Call) -> str:
        if not call.elsewhere:
            return self.connection.root(call.path)
        if self.options.reset is None:
            return self.options.reset_url or ""
        if self.options.reset_url is not None:
            return self.options.reset_url + call.path
        parts = urlsplit(self.connection.base_url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = PRESETS[self.options.reset].elsewhere_port
        return urlunsplit((parts.scheme, f"{host}:{port}", call.path, "", ""))

    def _urls(self, call: Call) -> Iterator[str]:
        url = self._url(call)
        if "{slot}" not in url:
            yield url
            return
        listed = self._answered("GET", self.connection.root("/slots"))
        slots = _json(listed[1])
        if listed[0] != 200 or not isinstance(slots, list) or not slots:
            raise EngineError(f"the server lists no slots: status {listed[0]}", self._hint())
        for slot in slots:
            yield url.replace("{slot}", str(slot.get("id") if isinstance(slot, dict) else slot))

    def _until_done(self, method: str, url: str) -> None:
        until = time.monotonic() + self.options.patience
        while True:
            status, text = self._answered(method, url)
            refusal = refused(status, text)
            if refusal is None:
                return
            told = self.connection.cleaned(refusal)
            if status in _NOT_OFFERED:
                raise EngineError(f"the cache cannot be emptied: {method} {url} answers {told}", self._hint())
            if time.monotonic() >= until:
                raise EngineError(
                    f"the cache was not emptied within {self.options.patience:g} s: {method} {url} answers {told}",
                    "a server resets only while nobody uses it; --patience waits longer",
                )
            self.pause(_PAUSE)

    def _answered(self, method: str, url: str) -> tuple[int, str]:
        try:
            return self.connection.call(method, expandvars(url), expandvars(self.options.reset_body))
        except AttemptError as error:
            raise EngineError(f"the cache cannot be emptied: {method} {url}: {error.told}", self._hint()) from error

    def _hint(self) -> str | None:
        return PRESETS[self.options.reset].hint if self.options.reset else None

    def _command(self, command: str) -> None:
        """A shell's command, so that it can name keys as variables; then until the server takes requests."""
        try:
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, errors="replace", timeout=self.options.patience
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"the reset's command was not done within {self.options.patience:g} s", "--patience waits longer"
            ) from error
        if done.returncode:
            said = self.connection.cleaned((done.stderr or done.stdout).strip().rpartition("\n")[2])
            raise EngineError(f"the reset's command failed with {done.returncode}" + (f": {said}" if said else ""))
        self.connection.reconnect()
        self._until_ready()

    def _until_ready(self) -> None:
        until = time.monotonic() + self.options.patience
        while True:
            try:
                status, _ = self.connection.call("GET", f"{self.connection.base_url}/models")
                said = f"status {status}"
                if status < 500 and status != 429:
                    return
            except AttemptError as error:
                said = error.told
            if time.monotonic() >= until:
                raise EngineError(
                    f"the server was not ready {self.options.patience:g} s after the reset: {said}",
                    "see its log; --patience waits longer",
                )
            self.pause(_PAUSE)


def refused(status: int, text: str) -> str | None:
    """Why a reset did not happen, whatever the status says; None where it did."""
    said = f"status {status}: {text}" if text.strip() else f"status {status}"
    body = _json(text)
    if status >= 300:
        return said
    if not isinstance(body, dict):
        return None
    failed = body.get("success") is False or bool(body.get("error")) or body.get("busy") is True
    status_told = body.get("status")
    return said if failed or (isinstance(status_told, str) and status_told.lower() in _FAILED) else None


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
