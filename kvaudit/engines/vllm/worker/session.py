"""What one process of vLLM observes of the job in force, from `begin` to `finish`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from kvaudit.engines.vllm.worker import lmcache_api
from kvaudit.engines.vllm.worker.job import Blended, Chunk, Failure, Job, Record, Rows
from kvaudit.engines.vllm.worker.ledger import Ledger, Loaded, Range, provenance
from kvaudit.records import Write

NOT_STORED = "Local cpu memory under pressure"
"""How LMCache begins its warning that it stores a prompt only in part; what follows runs cold."""
_HARMLESS = ("Pin count of MemoryObj", "Skipping abort-time backend cleanup")
"""How warnings begin by which nothing is lost: of every blend, its count of readers gone wrong, and of every answer
that ends at a stop string, in the half of the connector that holds no store."""
_REPEATS = 3
"""How often one warning stands in the log; it comes with every prompt, and some with every layer."""


def synchronise() -> None:
    """Wait for what a GPU was given to do: a clock that starts while it computes would count that work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(slots=True)
class Observed:
    """What the hooks saw of one job so far. chunks: (start, end, key) as LMCache splits the prompt. expected: the end
    of the last chunk that a lookup must find, from what the store held before."""

    job: Job
    chunks: list[tuple[int, int, str]] = field(default_factory=list)
    expected: int = 0
    looked_up: int | None = None
    loaded: tuple[Loaded, ...] = ()
    blended: Blended | None = None
    rows: Rows | None = None
    untimed_seconds: float = 0.0
    decided: int | None = None
    failure: Failure | None = None
    errors: list[str] = field(default_factory=list)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What runs within it is observation, and no part of TTFT. What was computed before it is."""
        synchronise()
        began = perf_counter()
        try:
            yield
        finally:
            self.untimed_seconds += perf_counter() - began


class Session:
    """One job at a time, and the ledger of the cache that the jobs share.

    roles: of LMCache's connectors in this process; both are here where a job can be followed.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.now: Observed | None = None
        self.roles: set[str] = set()
        self._stray: list[str] = []
        self._log = LogTap()

    @property
    def serving(self) -> Observed | None:
        """What is observed of a job that may use the cache."""
        return None if self.now is None or self.now.job.mode == "prefill" else self.now

    def begin(self, job: Job) -> None:
        self.now = seen = Observed(job, errors=self._stray)
        self._stray = []
        self._log.listen()
        engine = lmcache_api.engine()
        trouble = lmcache_api.trouble(engine)
        if engine is None or trouble is not None:
            seen.errors.append(str(trouble))
            return
        if lmcache_api.blender() is None:
            seen.errors.append("LMCache made no blender: chunks would be loaded and never blended")
        seen.chunks = lmcache_api.split(engine, job.prompt.token_ids)
        held = lmcache_api.stored(engine)
        for start, end, key in seen.chunks:
            if start == end or key not in held or held[key].layers < engine.num_layers:
                break
            seen.expected = end

    def loading(self, ranges: list[Range]) -> None:
        """LMCache moves these chunks into vLLM's cache, for the job that is served."""
        if self.now is not None:
            keys = {(start, end): key for start, end, key in self.now.chunks}
            self.now.loaded = tuple(Loaded(*where, self.ledger.get(keys.get(where, ""))) for where in ranges)

    def putting(self, puts: list[lmcache_api.Put]) -> None:
        for put in puts:
            if put.held:
                continue
            if self.now is None:
                self._stray.append(f"chunk {put.key} was stored by a prompt that no job named")
                continue
            if put.position is None:
                self.now.errors.append(f"LMCache stored chunk {put.key} and did not keep where it stood")
                continue
            where = (put.position, put.position + put.tokens)
            chunks = [(start, end) for start, end, _ in self.now.chunks]
            over = [each.entry for each in self.now.loaded if each.entry is not None and each.end <= put.position]
            self.ledger.put(put.key, self.now.job, where, chunks, over, put.size_bytes)

    def finish(self) -> Record:
        """The record of the job in force, which ends. Raises RuntimeError where none was begun."""
        seen, self.now = self.now, None
        if seen is None:
            raise RuntimeError("no job was begun")
        warnings, errors = self._log.take()
        engine = lmcache_api.engine()
        held = {} if lmcache_api.trouble(engine) else lmcache_api.stored(engine)
        self.ledger.keep(held)
        writes, evictions = self.ledger.take_journal()
        layers = 0 if engine is None else engine.num_layers
        where = {(each.start, each.end) for each in seen.loaded}
        return Record(
            seen.job.request_id,
            seen.job.part,
            seen.job.mode,
            chunks=tuple(
                Chunk(start, end, key, (start, end) in where, key in held and held[key].layers == layers)
                for start, end, key in seen.chunks
            ),
            looked_up=seen.looked_up or 0,
            reused_tokens=sum(each.end - each.start for each in seen.loaded),
            blended=seen.blended,
            provenance=provenance(seen.job.prompt, seen.loaded),
            writes=writes,
            evictions=evictions,
            rows=seen.rows,
            untimed_seconds=seen.untimed_seconds,
            decided=seen.decided,
            failure=seen.failure,
            errors=(*seen.errors, *_degraded(seen, writes), *errors),
            warnings=warnings,
        )

    def clear(self) -> None:
        """Empty LMCache and forget who wrote what it held."""
        engine = lmcache_api.engine()
        if engine is not None:
            lmcache_api.clear(engine)
        self.forget()

    def forget(self) -> None:
        self.ledger, self.now, self._stray = Ledger(), None, []


def _degraded(seen: Observed, writes: tuple[Write, ...]) -> Iterator[str]:
    """What did not happen although it had to, and of which LMCache says nothing."""
    if seen.job.mode == "prefill":
        if seen.loaded:
            yield "a full prefill loaded chunks"
        if writes:
            yield "a full prefill stored chunks"
        return
    if seen.looked_up is None:
        yield "LMCache was never asked for this prompt"
    elif seen.looked_up != seen.expected:
        yield f"LMCache's lookup found {seen.looked_up} tokens where its store held {seen.expected}"
    reached = max((each.end for each in seen.loaded), default=0)
    if seen.looked_up and reached != seen.looked_up:
        yield f"LMCache found {seen.looked_up} tokens and loaded chunks up to {reached}"
    if reached and seen.blended is None:
        yield "LMCache loaded chunks and blended nothing at its check layer"


class Repeats(logging.Filter):
    """Lets a warning through `_REPEATS` times, whatever stands in it."""

    def __init__(self) -> None:
        super().__init__()
        self._times: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        self._times[str(record.msg)] += 1
        return self._times[str(record.msg)] <= _REPEATS


class LogTap(logging.Handler):
    """Warnings and errors of LMCache's loggers since they were last taken; one that comes often is kept once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: dict[tuple[bool, str], tuple[str, int]] = {}
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        message = str(record.msg)
        if message.startswith(_HARMLESS):
            return
        key = (record.levelno >= logging.ERROR or message.startswith(NOT_STORED), message)
        first, times = self._told.get(key, (record.getMessage(), 0))
        self._told[key] = (first, times + 1)

    def listen(self) -> None:
        """To every logger of LMCache's that there is by now: each keeps its records to itself. LMCACHE_LOG_LEVEL may
        have silenced it.
        """
        for name, logger in list(logging.root.manager.loggerDict.items()):
            if name.partition(".")[0] == lmcache_api.LOGGERS and isinstance(logger, logging.Logger):
                for handler in logger.handlers:
                    if handler is not self:
                        handler.addFilter(self._repeats)
                logger.addHandler(self)
                logger.setLevel(min(logger.level, logging.WARNING))

    def take(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(warnings, errors)"""
        told, self._told = self._told, {}

        def lines(error: bool) -> tuple[str, ...]:
            return tuple(
                f"LMCache: {first}" + (f" ({times} times)" if times > 1 else "")
                for (is_error, _), (first, times) in told.items()
                if is_error is error
            )

        return lines(False), lines(True)
