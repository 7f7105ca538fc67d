"""Which server it is, whether it was restarted, and whether somebody else uses it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from threading import Lock
from urllib.parse import urlsplit

from kvaudit.engines.server.jsons import object_in
from kvaudit.engines.server.metrics import Metrics, read_metrics
from kvaudit.engines.server.sending import AttemptError, Connection
from kvaudit.errors import EngineError, UsageError

_VERSIONS = (("/version", "version"), ("/get_server_info", "version"), ("/props", "build_info"))
"""Where vLLM, SGLang and llama.cpp tell their version; the latter two tell there which files they loaded."""
_FILES = "model_path"
_SETTLING_SECONDS = 2.0
"""Counters may lag behind answers; longer than this nobody waits for them."""
_PORTS = {"http": 80, "https": 443}
_THIS_MACHINE = frozenset({"localhost", "::1"})
_SNAPSHOT = re.compile(r"models--(?:[^/]+?--)?([^/]+)/snapshots/[^/]+/?")
"""How Hugging Face's cache names the folder of a model."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says of itself that stays as long as the deployment does. `models`: by id, what their files are.

    `rooted`: the models whose files its list names. `files`: those that it loaded, where it tells them elsewhere.
    """

    version: str | None
    models: Mapping[str, str]
    rooted: frozenset[str] = frozenset()
    files: str | None = None

    def facts(self, model: str) -> dict[str, object]:
        """None where the server does not say; that it lists models and not this one is something that it says."""
        return {"version": self.version, "weights": self._weights(model)}

    def weights_name(self, model: str) -> str | None:
        """What the model's files are called, wherever they lie; None where the server does not name them."""
        weights = self._weights(model)
        if weights is None or (model not in self.rooted and weights != self.files):
            return None
        kept = _SNAPSHOT.search(weights)
        return kept[1] if kept else PurePosixPath(weights).name

    def _weights(self, model: str) -> str | None:
        """SGLang's list has a model's own name in place of its files."""
        listed = self.models.get(model, "not served" if self.models else None)
        return self.files if self.files is not None and listed in (model, None) else listed


def read_identity(connection: Connection) -> Identity:
    """Raises AttemptError where the server cannot be asked."""
    status, text = connection.call("GET", f"{connection.base_url}/models")
    listed = object_in(text).get("data") if status == 200 else None
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    models = {str(entry["id"]): str(entry.get("root") or entry["id"]) for entry in entries if "id" in entry}
    rooted = frozenset(str(entry["id"]) for entry in entries if "id" in entry and entry.get("root"))
    version, files = _told_elsewhere(connection)
    return Identity(version, models, rooted, files)


def same_address(one: str, other: str) -> bool:
    """Whether two URLs lead to the same host, port and path."""
    return _address(one) == _address(other)


def _address(url: str) -> tuple[str | None, int | None, str]:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in _THIS_MACHINE else parts.hostname
    return host, parts.port or _PORTS.get(parts.scheme), parts.path.rstrip("/")


def check_model(identity: Identity, model: str) -> None:
    """Raises UsageError where the server lists its models, and this is none of them."""
    if identity.models and model not in identity.models:
        raise UsageError(f"the server does not serve {model!r}", f"it serves {', '.join(sorted(identity.models))}")


def _told_elsewhere(connection: Connection) -> tuple[str | None, str | None]:
    """The version, and the files where they stand beside it."""
    for path, name in _VERSIONS:
        found = object_in(connection.found(path) or "")
        version, files = found.get(name), found.get(_FILES)
        if isinstance(version, str):
            return version, files if isinstance(files, str) and files else None
    return None, None


@dataclass(slots=True)
class Watch:
    """Looks at a server's /metrics around requests, where it has them.

    `sent` counts what we sent since the counters were last taken as they are (`begin`).
    """

    connection: Connection
    latest: Metrics | None = None
    sent: int = 0
    first: Metrics | None = None
    _lock: Lock = field(default_factory=Lock)

    @property
    def sees_restarts(self) -> bool:
        return self.first is not None and (self.first.started is not None or self.first.growing is not None)

    def sending(self) -> None:
        """Told before every attempt, also from several threads: the server may count it before it has answered."""
        with self._lock:
            self.sent += 1

    def begin(self) -> None:
        """Take the server as it is now: it may have been restarted by a reset."""
        self.first = self.latest = self._look()
        self.sent = 0

    def settled(self) -> Metrics | None:
        """The counters once the last request is among them, or after a while."""
        if self.latest is None or self.latest.cached_tokens is None:
            return None
        until, before = time.monotonic() + _SETTLING_SECONDS, self.latest.requests
        found = self._look()
        while found is not None and before is not None and time.monotonic() < until:
            if found.requests is not None and found.requests > before:
                break
            time.sleep(0.01)
            found = self._look()
        return found

    def check(self, found: Metrics | None = None) -> None:
        """Raises EngineError where the server was restarted, or served somebody else, since `begin`."""
        if self.first is None:
            return
        if found is None and self.sees_restarts:
            found = self._look()
        if found is None:
            return
        self.latest = found
        if not self.sees_restarts:
            return
        restarted = found.started != self.first.started or (found.growing or 0) < (self.first.growing or 0)
        if restarted:
            raise restart()
        if found.requests is not None and found.requests - (self.first.requests or 0) > self.sent:
            raise EngineError(
                f"the server answered {found.requests - (self.first.requests or 0):.0f} requests, and {self.sent} were "
                "ours: somebody else's are part of its history",
                "audit a server that nobody else uses meanwhile; the same command starts the arm anew",
            )

    def _look(self) -> Metrics | None:
        try:
            text = self.connection.found("/metrics")
        except AttemptError as error:
            if error.kind == "gone":
                raise EngineError(
                    f"the server went away in the middle of an arm ({error.told}): the arm is void",
                    "start the server again; the same command starts the arm anew",
                ) from error
            return None
        return None if text is None else read_metrics(text)


def restart() -> EngineError:
    return EngineError(
        "the server was restarted in the middle of an arm: its cache is gone, and the arm is void",
        "the same command starts the arm anew",
    )
