"""Whether a server was restarted, and whether somebody else uses it: its /metrics, looked at around requests."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from threading import Lock

from kvaudit.engines.server.metrics import Metrics, read_metrics
from kvaudit.engines.server.replies import AttemptError
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import EngineError

_SETTLING_SECONDS = 2.0
"""Counters may lag behind answers; longer than this nobody waits for them."""


@dataclass(slots=True)
class Watch:
    """Looks at a server's /metrics around requests, where it has them.

    `sent`: what we sent and the counters had not counted when they were last taken as they are (`begin`).
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
        """Take the server as it is now: it may have been restarted by a reset.

        Where it was not, its counters may lag: what they have not counted yet they will count later.
        """
        found = self._look()
        if self.first is None or found is None or _restarted(self.first, found):
            self.sent = 0
        else:
            self.sent = max(0, self.sent - _counted(self.first, found))
        self.first = self.latest = found

    def end(self) -> None:
        """Wait until all that was sent is counted, or for a while.

        To who watches the server next, also for a further arm, it would be somebody else's.
        """
        until = time.monotonic() + _SETTLING_SECONDS
        while self.first is not None and (left := until - time.monotonic()) > 0:
            try:
                _, text = self.connection.call("GET", self.connection.root("/metrics"), seconds=left)
            except AttemptError:
                return
            found = read_metrics(text)
            if found.requests is None or _restarted(self.first, found) or _counted(self.first, found) >= self.sent:
                return
            time.sleep(0.01)

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
        if _restarted(self.first, found):
            raise restart()
        counted = _counted(self.first, found)
        if counted > self.sent:
            raise EngineError(
                f"the server answered {counted} requests, and {self.sent} were ours: somebody else's are part of its "
                "history",
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


def _restarted(before: Metrics, now: Metrics) -> bool:
    return now.started != before.started or (now.growing or 0) < (before.growing or 0)


def _counted(before: Metrics, now: Metrics) -> int:
    """How many requests were answered in between."""
    return round((now.requests or 0) - (before.requests or 0))


def restart() -> EngineError:
    return EngineError(
        "the server was restarted in the middle of an arm: its cache is gone, and the arm is void",
        "the same command starts the arm anew",
    )
