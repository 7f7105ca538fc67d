"""How many tokens of a prompt came from a cache: from the usage, from llama.cpp's timings, or from /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvaudit.engines.server.claims import MOST_TOKENS
from kvaudit.engines.server.identity import Watch
from kvaudit.engines.server.metrics import Metrics
from kvaudit.engines.server.sending import Reply

CountedBy = Literal["usage", "timings", "metrics"]


@dataclass(frozen=True, slots=True)
class Counts:
    """What one answer tells of cached tokens, each way of telling by itself; None where it does not."""

    usage: int | None
    timings: int | None
    metrics: int | None

    def by(self, way: CountedBy) -> int | None:
        return self.usage if way == "usage" else self.timings if way == "timings" else self.metrics


@dataclass(slots=True)
class Counter:
    """`way` is settled at the opening; None: the server tells nothing."""

    watch: Watch
    way: CountedBy | None = None

    def all(self, reply: Reply, before: Metrics | None) -> Counts:
        """Every way, for the opening."""
        return Counts(
            reply.answer.counts()["cached_tokens"],
            _whole(reply.timings.get("cache_n")),
            self._from_metrics(before, self.watch.settled()),
        )

    def cached(self, reply: Reply, before: Metrics | None) -> int | None:
        """None where the server does not say.

        A usage without a count stands for 0 once a count was seen: vLLM leaves out what is 0. No usage says nothing.
        """
        if self.way == "metrics":
            found = self.watch.settled()
            self.watch.check(found)
            return self._from_metrics(before, found)
        self.watch.check()
        if self.way == "usage":
            return (reply.answer.counts()["cached_tokens"] or 0) if reply.answer.usage else None
        return None if self.way is None else _whole(reply.timings.get("cache_n"))

    def _from_metrics(self, before: Metrics | None, after: Metrics | None) -> int | None:
        was = None if before is None else before.cached_tokens
        now = None if after is None else after.cached_tokens
        return None if was is None or now is None else max(0, round(now - was))


def way_of(cold: Counts, warm: Counts) -> CountedBy | None:
    """How a server counts, from a prompt that was new and was then sent again."""
    ways: tuple[CountedBy, ...] = ("usage", "timings", "metrics")
    seen = [way for way in ways if (warm.by(way) or 0) > 0]
    told = [way for way in ways if warm.by(way) is not None]
    return next(iter([*seen, *told]), None)


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None
