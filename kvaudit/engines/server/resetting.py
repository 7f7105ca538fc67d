"""Emptying a server's cache: by HTTP calls whose success stands in the body, or by a command of the user's.

Variables of the environment (`$NAME`) are put in where a call is made. What the user wrote may hold keys as well: of
commands, bodies, and the user and query of addresses nothing but a digest is told.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from os.path import expandvars
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

import httpx

from kvaudit.digests import digested
from kvaudit.engines.server.jsons import value_in, with_texts
from kvaudit.engines.server.keys import sought, without
from kvaudit.engines.server.options import VARIABLE, ServerOptions, variables_in
from kvaudit.engines.server.presets import PRESETS, Call, Preset
from kvaudit.engines.server.refusals import is_busy, refused
from kvaudit.engines.server.replies import AttemptError
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import EngineError
from kvaudit.proxy.credentials import is_credential_name

_PAUSE = 0.25
_WORD = re.compile(r"[^\s'\"`=:,;@&?/\\]+")
_PLAIN = re.compile(r"-*[a-z]+(?:-[a-z]+)*")
"""Words of a command, such as `docker`, that its errors may repeat."""


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
        """What is done, for the manifest."""
        if self.options.reset_command is not None:
            return f"command ({digested(self.options.reset_command)})"
        calls = ", ".join(f"{call.method} {self._shown(self._url(call))}" for call in self._calls())
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
            return self.options.reset_url.rstrip("/") + call.path
        parts = urlsplit(self.connection.base_url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = PRESETS[self.options.reset].elsewhere_port
        return urlunsplit((parts.scheme, f"{host}:{port}", call.path, "", ""))

    def _urls(self, call: Call) -> Iterator[str]:
        url = self._url(call)
        if "{slot}" not in url:
            yield url
            return
        listed = self._answered("GET", self.connection.root("/slots"), self.options.patience)
        slots = value_in(listed[1])
        if listed[0] != 200 or not isinstance(slots, list) or not slots:
            raise EngineError(f"the server lists no slots: status {listed[0]}", self._hint())
        for slot in slots:
            yield url.replace("{slot}", str(slot.get("id") if isinstance(slot, dict) else slot))

    def _until_done(self, method: str, url: str) -> None:
        until = time.monotonic() + self.options.patience
        while True:
            left = max(_PAUSE, until - time.monotonic())
            status, text = self._answered(method, url, left)
            refusal = refused(status, text)
            if refusal is None:
                return
            told = f"{method} {self._shown(url)} answers {self._told(refusal)}"
            if not is_busy(status, text, self._preset.busy if self._preset else ()):
                raise EngineError(f"the cache cannot be emptied: {told}", self._hint())
            if time.monotonic() >= until:
                raise EngineError(
                    f"the cache was not emptied within {self.options.patience:g} s: {told}",
                    "a server resets only while nobody uses it; --patience waits longer",
                )
            self.pause(_PAUSE)

    def _answered(self, method: str, url: str, seconds: float) -> tuple[int, str]:
        try:
            return self.connection.call(method, expandvars(url), _expanded(self.options.reset_body), seconds)
        except AttemptError as error:
            hint = "--patience waits longer" if error.kind == "slow" else self._hint()
            told = f"{method} {self._shown(url)}: {self._told(error.told)}"
            raise EngineError(f"the cache cannot be emptied: {told}", hint) from error
        except httpx.InvalidURL:
            raise EngineError(
                f"the cache cannot be emptied: {method} {self._shown(url)} is no address with its variables put in",
                "see that they hold no line break and no other sign that an address cannot",
            ) from None

    def _shown(self, url: str) -> str:
        """A preset's query is no secret."""
        return url if self.options.reset else digested(url)

    @property
    def _preset(self) -> Preset | None:
        return PRESETS[self.options.reset] if self.options.reset else None

    def _hint(self) -> str | None:
        return self._preset.hint if self._preset else None

    def _told(self, text: str) -> str:
        """What was said, without what the user wrote, the variables named there, and those that are named like keys."""
        given = (self.options.reset_url, self.options.reset_body, self.options.reset_command)
        named = {name for part in given for name in variables_in(part or "")}
        values = [value for name, value in os.environ.items() if name in named or is_credential_name(name)]
        return self.connection.cleaned(without(text, sought([*values, *self._written()], in_errors=True)))

    def _written(self) -> Iterator[str]:
        """What may be a key in what the user wrote."""
        if url := self.options.reset_url:
            parts = urlsplit(url)
            yield from (url, parts.query, *(value for _, value in parse_qsl(parts.query)))
            yield from (unquote(part) for part in (parts.username, parts.password) if part)
        if body := self.options.reset_body:
            yield from (body, _expanded(body), *(value for _, value in parse_qsl(body)))
            yield from _texts(value_in(body))
        if command := self.options.reset_command:
            yield command
            yield from (word for word in _WORD.findall(command) if not _PLAIN.fullmatch(word))

    def _command(self, command: str) -> None:
        """A shell's command, so that it can name keys as variables; then until the server takes requests.

        What it says goes into a file: a server that it leaves running in the background holds a pipe open.
        """
        with TemporaryFile() as output:
            try:
                code = subprocess.run(
                    command, shell=True, stdout=output, stderr=subprocess.STDOUT, timeout=self.options.patience
                ).returncode
            except subprocess.TimeoutExpired:
                raise EngineError(
                    f"the reset's command was not done within {self.options.patience:g} s", "--patience waits longer"
                ) from None
            output.seek(0)
            last = output.read().decode(errors="replace").strip().rpartition("\n")[2] if code else ""
        if code:
            said = self._told(last)
            raise EngineError(f"the reset's command failed with {code}" + (f": {said}" if said else ""))
        self.connection.reconnect()
        self._until_ready()

    def _until_ready(self) -> None:
        until = time.monotonic() + self.options.patience
        while True:
            try:
                left = max(_PAUSE, until - time.monotonic())
                status, _ = self.connection.call("GET", f"{self.connection.base_url}/models", seconds=left)
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


def _texts(value: Any) -> list[str]:
    """Every text in a value, however deep."""
    found: list[str] = []

    def seen(text: str) -> str:
        found.append(text)
        return text

    with_texts([value], seen)
    return found


def _expanded(body: str) -> str:
    """With variables put in as the texts of JSON that they stand in, where it is JSON."""
    if value_in(body) is None:
        return expandvars(body)

    def written(match: re.Match[str]) -> str:
        value = os.environ.get(match[1] or match[2])
        return match[0] if value is None else json.dumps(value)[1:-1]

    return VARIABLE.sub(written, body)
