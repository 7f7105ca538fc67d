"""Which server it is, whether it was restarted, and whether somebody else uses it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

from kvaudit.engines.server.jsons import object_in
from kvaudit.engines.server.metrics import Metrics, read_metrics
from kvaudit.engines.server.sending import AttemptError, Connection
from kvaudit.errors import EngineError, UsageError

_VERSIONS = (("/version", "version"), ("/get_server_info", "version"), ("/props", "build_info"))
"""Where vLLM, SGLang and llama.cpp tell their version."""
_SETTLING_SECONDS = 2.0
"""Counters may lag behind answers; longer than this nobody waits for them."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says of itself that stays as long as the deployment does. `models`: by id, what their files are."""

    version: str | None
    models: Mapping[str, str]

    def facts(self, model: str) -> dict[str, object]:
        """None where the server does not say; that it lists models and not this one is something that it says."""
        return {"version": self.version, "weights": self.models.get(model, "not served" if self.models else None)}


def read_identity(connection: Connection) -> Identity:
    """Raises AttemptError where the server cannot be asked."""
    status, text = connection.call("GET", f"{connection.base_url}/models")
    listed = object_in(text).get("data") if status == 200 else None
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    models = {str(entry["id"]): str(entry.get("root") or entry["id"]) for entry in entries if "id" in entry}
    return Identity(_version(connection), models)


def check_model(identity: Identity, model: str) -> None:
    """Raises UsageError where the server lists its models, and this is none of them."""
    if identity.models and model not in identity.models:
        raise UsageError(f"the server does not serve {model!r}", f"it serves {', '.join(sorted(identity.models))}")


def _version(connection: Connection) -> str | None:
    for path, name in _VERSIONS:
        found = object_in(connection.found(path) or "").get(name)
        if isinstance(found, str):
            return found
    return None


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
            raise EngineError(
                "the server was restarted in the middle of an arm: its cache is gone, and the arm is void",
                "the same command starts the arm anew",
            )
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
