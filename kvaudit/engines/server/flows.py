"""An answer as it arrives: what tells nothing for too long, or never ends, is given up."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_BYTES, _BYTES_A_TOKEN = 1 << 26, 1 << 16
"""Far more than answers have, also with the ids of a long prompt and the likeliest tokens beside each."""
_EVENTS, _EVENTS_A_TOKEN = 1000, 100
"""Servers send an event a token, and some that smooth their streams one a letter."""

_QUESTION_STARTS = "http11.send_request_headers.started"


@dataclass(slots=True)
class Flow:
    """`limit`: tokens that the answer may have. `seconds`: as long may nothing be told."""

    limit: int | None
    seconds: float
    bytes_taken: int = 0
    events: int = 0
    latest: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """The answer has begun: what its prompt took before is bounded by the connection's own limit."""
        self.latest = time.perf_counter()

    def told(self) -> None:
        """An event brought content: one that brings none, or a comment, only keeps a connection open."""
        self.events += 1
        self.latest = time.perf_counter()

    def take(self, chunk: bytes) -> None:
        self.bytes_taken += len(chunk)

    @property
    def is_silent(self) -> bool:
        return time.perf_counter() - self.latest > self.seconds

    @property
    def is_endless(self) -> bool:
        limit = self.limit or 0
        too_many = self.limit is not None and self.events > _EVENTS + limit * _EVENTS_A_TOKEN
        return too_many or self.bytes_taken > _BYTES + limit * _BYTES_A_TOKEN


class Clock:
    """Runs from when the request is sent: how long the connection took is no time of the server's."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self, event: str, _: Mapping[str, Any]) -> None:
        if event == _QUESTION_STARTS:
            self._started = time.perf_counter()

    def milliseconds(self, until: float | None = None) -> float:
        return 1000 * ((time.perf_counter() if until is None else until) - self._started)
