"""The options of the real engines (`--option NAME=VALUE`), read and checked before anything is started."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvaudit.engines import PRESETS, EngineSettings, Switches
from kvaudit.errors import UsageError

KNOWN: Mapping[str, str] = {
    "prefix-caching": "on or off: vLLM's own prefix cache (vllm: on; lmcache: off)",
    "max-model-len": "tokens that a prompt and its answer may have (the model's, at most 32768)",
    "max-num-batched-tokens": "tokens that vLLM computes at a time (as many as a prompt may have)",
    "cuda-graphs": "on or off: let vLLM capture CUDA graphs (off)",
    "gpu-memory-utilization": "the share of a GPU's memory that vLLM takes (vLLM's own)",
    "start-timeout": "seconds that vLLM may take to start (600)",
    "answer-timeout": "seconds that vLLM may take for an answer (600)",
}
SEPARATOR = "separator"
LMCACHE_ONLY: Mapping[str, str] = {SEPARATOR: "the text that separates chunks in the trace (' # # ')"}

LONGEST = 32768
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for; None where nothing was. Times in seconds."""

    prefix_caching: bool | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    cuda_graphs: bool
    gpu_memory_utilization: float | None
    start_seconds: float
    answer_seconds: float
    separator: str | None


def read_options(engine: str, settings: EngineSettings) -> Options:
    """Raises UsageError, naming the engine, for unknown options, values that are none, and settings that only other
    engines have."""
    given = settings.options
    known = {**KNOWN, **(LMCACHE_ONLY if engine == "lmcache" else {})}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UsageError(f"engine {engine!r} has no option {unknown[0]!r}", f"known: {', '.join(known)}")
    if settings.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {settings.dtype!r}", f"known: {', '.join(DTYPES)}")
    separator = given.get(SEPARATOR)
    if separator == "":
        raise UsageError(f"engine {engine!r}: the separator is empty", "give the text that stands between chunks")
    return Options(
        prefix_caching=_switch(engine, given, "prefix-caching"),
        max_model_len=_whole(engine, given, "max-model-len"),
        max_num_batched_tokens=_whole(engine, given, "max-num-batched-tokens"),
        cuda_graphs=bool(_switch(engine, given, "cuda-graphs")),
        gpu_memory_utilization=_share(engine, given, "gpu-memory-utilization"),
        start_seconds=_whole(engine, given, "start-timeout") or 600,
        answer_seconds=_whole(engine, given, "answer-timeout") or 600,
        separator=separator,
    )


def check_own_switches(engine: str, switches: Switches, own: Switches, free: frozenset[str] = frozenset()) -> None:
    """Refuse switches that are not the engine's `own`: a real system computes as it does. Those in `free` can be set.

    The default preset stands for 'nothing was asked for'.
    """
    default = PRESETS["lmcache"]
    other = [
        name
        for name in Switches.__slots__
        if name not in free and getattr(switches, name) not in (getattr(own, name), getattr(default, name))
    ]
    if other:
        told = ", ".join(f"{name.replace('_', '-')} {getattr(switches, name)!r}" for name in other)
        raise UsageError(
            f"engine {engine!r} is a real system and computes as it does: {told} cannot be set",
            "leave --like and its switches out, or take --engine embedded",
        )


def _switch(engine: str, given: Mapping[str, str], name: str) -> bool | None:
    value = given.get(name)
    if value not in (None, "on", "off"):
        raise UsageError(f"engine {engine!r}: {name} is {value!r}", "give on or off")
    return None if value is None else value == "on"


def _whole(engine: str, given: Mapping[str, str], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if not value.isascii() or not value.isdecimal() or not int(value):
        raise UsageError(f"engine {engine!r}: {name} is {value!r}", "give a whole number above 0")
    return int(value)


def _share(engine: str, given: Mapping[str, str], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(f"engine {engine!r}: {name} is {value!r}", "give a share above 0 and at most 1, such as 0.9")
    return share
