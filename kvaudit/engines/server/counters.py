"""How many tokens of a prompt came from a cache: from the usage, from llama.cpp's timings, or from /metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvaudit.engines.server.claims import MOST_TOKENS
from kvaudit.engines.server.metrics import Metrics
from kvaudit.engines.server.replies import Reply
from kvaudit.engines.server.watching import Watch, restart
from kvaudit.errors import EngineError

CountedBy = Literal["usage", "timings", "metrics"]
_MOST_DIGITS = 10


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
            _whole(_told(reply.answer.usage)),
            _whole(reply.timings.get("cache_n")),
            _grown(before, self.watch.settled()),
        )

    def cached(self, reply: Reply, before: Metrics | None) -> int | None:
        """None where the server does not say.

        A usage without a count stands for 0 once a count was seen: vLLM leaves out what is 0. No usage says nothing,
        nor does a count that cannot be read. Raises EngineError where the server was restarted, and for a count that is
        larger than the prompt.
        """
        if self.way == "metrics":
            found = self.watch.settled()
            self.watch.check(found)
            grown = _grown(before, found)
            if grown is not None and grown < 0:
                raise restart()
            return grown
        self.watch.check()
        if self.way == "usage":
            return _of_usage(reply.answer.usage)
        return None if self.way is None else _whole(reply.timings.get("cache_n"))


def way_of(cold: Counts, warm: Counts) -> CountedBy | None:
    """How a server counts, from a prompt that was new and was then sent again."""
    ways: tuple[CountedBy, ...] = ("usage", "timings", "metrics")
    seen = [way for way in ways if (warm.by(way) or 0) > 0]
    told = [way for way in ways if warm.by(way) is not None]
    return next(iter([*seen, *told]), None)


def _of_usage(usage: Mapping[str, Any]) -> int | None:
    told, prompt = _told(usage), _prompt(usage)
    if told is None:
        return None if prompt is None else 0
    cached = _whole(told)
    if cached is not None and prompt is not None and cached > prompt:
        raise EngineError(f"the server counted {cached} cached tokens in a prompt of {prompt}")
    return cached


def _told(usage: Mapping[str, Any]) -> object:
    """What a usage says of cached tokens, as it stands there; None where it says nothing."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    told = details.get("cached_tokens") if isinstance(details, dict) else details
    return usage.get("prompt_cache_hit_tokens") if told is None else told


def _prompt(usage: Mapping[str, Any]) -> int | None:
    counted = (_whole(usage.get(name)) for name in ("prompt_tokens", "input_tokens"))
    return next((count for count in counted if count is not None), None)


def _grown(before: Metrics | None, after: Metrics | None) -> int | None:
    """By how many cached tokens; below 0 after a restart, None where there is no such counter."""
    was = None if before is None else before.cached_tokens
    now = None if after is None else after.cached_tokens
    return None if was is None or now is None else round(now - was)


def _whole(value: object) -> int | None:
    """A count of tokens, also as a text or with a fraction of 0; None for all else."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None
