"""What becomes of exchanges: written one after the other by a thread of their own, counted, and missed loudly."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvaudit.errors import KvauditError
from kvaudit.proxy.capture import Capture
from kvaudit.proxy.exchange import Exchange, Headers, api_of
from kvaudit.reports.escape import visible

KEPT_BYTES = 64 << 20
"""The largest request, and the largest answer, that is kept."""

_WAITING_BYTES = 512 << 20
"""Requests and answers that may wait for the disk before further ones are lost."""

_SECONDS_BETWEEN_WARNINGS = 30.0


@dataclass(slots=True)
class Counts:
    """`lost` exchanges could not be written. `with_cached_tokens`: the server said how much of its cache it used.

    Of recorded exchanges, `unread_requests` and `unread_answers` are without the parsed request, or with an answer that
    is not whole, because something in them could not be parsed.
    """

    recorded: int = 0
    lost: int = 0
    passed_on: int = 0
    with_cached_tokens: int = 0
    unread_requests: int = 0
    unread_answers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


class Recording:
    """Takes exchanges from the proxy. `say` tells the operator; `strict` refuses traffic once an exchange is lost."""

    def __init__(
        self, capture: Capture, say: Callable[[str], None], *, strict: bool = False, limit: int = KEPT_BYTES
    ) -> None:
        self.counts = Counts()
        self.last_failure: str | None = None
        self._capture, self._say, self._strict, self._limit = capture, say, strict, limit
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recording")
        self._lock = threading.Lock()
        self._waiting = self._begun = 0
        self._warned_at: float | None = None

    @property
    def refuses(self) -> bool:
        """Whether clients are turned away, because what they ask would not be recorded."""
        return self._strict and self.counts.lost > 0

    def begin(self, method: str, path: str, headers: Headers, query: bytes) -> Exchange | None:
        """None for a request that is only passed on."""
        api = api_of(method, path)
        if api is None:
            self.counts.passed_on += 1
            return None
        return Exchange(api, path, headers, query, self._limit)

    def add(self, exchange: Exchange) -> None:
        """Have an ended exchange written. Returns at once."""
        size = exchange.kept_bytes
        with self._lock:
            if waits := self._waiting + size > _WAITING_BYTES:
                self._lose("the disk is too slow")
            else:
                self._waiting += size
                self._begun += 1
        if not waits:
            self._writer.submit(self._write, exchange, self._begun, size)

    def close(self) -> Counts:
        """Wait until everything is written."""
        self._writer.shutdown(wait=True)
        return self.counts

    def _write(self, exchange: Exchange, number: int, size: int) -> None:
        failure = None
        try:
            run = self._capture.current_run()
            self._capture.append(exchange.line(f"r{run}-{number}"))
        except KvauditError as error:
            failure = error.message
        except OSError as error:
            failure = error.strerror or str(error)
        except Exception as error:  # a fault of ours: the next exchange may be written all the same
            failure = visible(f"{type(error).__name__}: {error}")
        with self._lock:
            self._waiting -= size
            if failure is not None:
                self._lose(failure)
            else:
                self._count(exchange)

    def _count(self, exchange: Exchange) -> None:
        self.counts.recorded += 1
        self.counts.outcomes[exchange.outcome or ""] += 1
        self.counts.unread_requests += exchange.request_unread
        self.counts.unread_answers += exchange.answer_unread
        self.counts.with_cached_tokens += exchange.answer.counts()["cached_tokens"] is not None
        if self._warned_at is not None:
            self._warned_at = None
            self._say(f"recording goes on; {self.counts.lost:,} exchanges are lost")

    def _lose(self, reason: str) -> None:
        self.counts.lost += 1
        self.last_failure = reason
        now = time.monotonic()
        if self._warned_at is None or now - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = now
            traffic = "clients are turned away (--strict)" if self._strict else "traffic goes on without a record"
            self._say(
                f"WARNING: NOT RECORDING to {self._capture.path}: {reason}. {self.counts.lost:,} lost so far; {traffic}"
            )
