"""A server's own counters, as it tells them to Prometheus."""

from __future__ import annotations

import re
from dataclasses import dataclass

STARTED = "process_start_time_seconds"
CACHED = (
    ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
    ("sglang:cached_tokens_total",),
    ("lmcache:num_hit_tokens_total",),
    ("llamacpp:prompt_tokens_cached_total",),
)
"""Tokens served from a cache; the first group of which a server tells any counts, and is summed."""
_NONE_CACHED = "sglang:num_requests_total"
"""SGLang counts each request, and tells of cached tokens from the first one on."""
REQUESTS = ("vllm:request_success_total", _NONE_CACHED)
GROWING = (*REQUESTS, "llamacpp:prompt_tokens_total")
"""What only a restart makes smaller."""
_NONE_AS_LARGE = 2.0**63
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Sums over the labels of each name."""

    values: dict[str, float]

    def total(self, *names: str) -> float | None:
        """None where the server tells none of them."""
        told = [self.values[name] for name in names if name in self.values]
        return sum(told) if told else None

    @property
    def started(self) -> float | None:
        """When the process began, seconds since 1970."""
        return self.total(STARTED)

    @property
    def cached_tokens(self) -> float | None:
        told = next((total for names in CACHED if (total := self.total(*names)) is not None), None)
        return 0.0 if told is None and _NONE_CACHED in self.values else told

    @property
    def requests(self) -> float | None:
        """Requests that were answered."""
        return self.total(*REQUESTS)

    @property
    def growing(self) -> float | None:
        return self.total(*GROWING)


def read_metrics(text: str) -> Metrics:
    """From Prometheus' text format; lines that are none of it, and what is no number, are passed over."""
    values: dict[str, float] = {}
    for line in text.split("\n"):
        matched = _SAMPLE.fullmatch(line)
        if matched is None:
            continue
        try:
            total = values.get(matched[1], 0.0) + float(matched[2])
        except ValueError:
            continue
        if abs(total) < _NONE_AS_LARGE:
            values[matched[1]] = total
    return Metrics(values)
