"""vLLM's offline engine, started with an environment of its own, its output in a log file, and ended for certain.

The engine runs in a process of its own, as it does when people deploy it: it is spawned with the environment that it
needs (PYTHONHASHSEED among it, which must be set before Python starts), and a user need not do anything.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from kvaudit.engines.vllm.processes import Caller, LostError, Started, end
from kvaudit.errors import EngineError, KvauditError

HASH_SEED = "PYTHONHASHSEED"
LAST_LINES, _LONGEST_LINE = 8, 300
_CLOSE_SECONDS = 30.0
_LEAVE_SECONDS = 3.0
"""How long a start may take to end once its processes are ended; what it still says goes to the log."""
_LOGGERS = ("vllm", "lmcache")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start vLLM: `arguments` of `vllm.LLM`, `environment` for its processes, times in seconds."""

    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    log: Path
    start_seconds: float
    answer_seconds: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `top` maps the likeliest token ids to their natural log-probabilities, likeliest first;
    `cached_tokens` is what vLLM took from a cache in place of computing it."""

    token_id: int
    top: Mapping[int, float]
    cached_tokens: int


@dataclass(slots=True)
class Asked:
    """What vLLM did with one prompt. `ttft_ms` is vLLM's own metric: from the prompt's arrival to its first token."""

    tokens: list[Token] = field(default_factory=list)
    ttft_ms: float | None = None
    total_ms: float = 0.0

    @property
    def cached_tokens(self) -> int:
        return self.tokens[0].cached_tokens if self.tokens else 0


class Running:
    """vLLM while it runs. One prompt at a time."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._asked = 0
        self._caller, started = Caller(), Started()
        with _naming("cannot be started", launch.log), _environment(launch.environment), _output_to(launch.log):
            try:
                self._llm = self._caller.call(lambda: _llm(launch), launch.start_seconds, started)
            except BaseException:
                end(started, patience=0.0)
                self._caller.close(_LEAVE_SECONDS)
                raise
        self._processes = list(started)

    @property
    def block_size(self) -> int:
        """Tokens of a block of vLLM's cache."""
        return int(self._llm.llm_engine.vllm_config.cache_config.block_size)

    def ask(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        ended: Callable[[int], bool],
        top: int | None = None,
        salt: str | None = None,
        end_ids: Collection[int] = (),
    ) -> Asked:
        """Greedy decoding of a prompt until `ended` says so of the newest token, or after `max_tokens`.

        `end_ids` are tokens at which vLLM itself ends.

        With `salt`, blocks that vLLM caches can be found by nobody without it. Raises EngineError when the engine
        fails or gives no token for too long.
        """
        return self._answer("failed", lambda: self._ask(token_ids, max_tokens, ended, top, salt, end_ids))

    def rpc(self, method: str, *arguments: object) -> Any:
        """What the worker extension answers. Raises EngineError when it fails."""
        return self._answer(f"failed in {method}", lambda: self._llm.collective_rpc(method, args=arguments)[0])

    def reset_prefix_cache(self) -> bool:
        """vLLM's own reset, and what it says of it."""
        return bool(self._answer("failed to empty its cache", self._llm.reset_prefix_cache))

    def close(self) -> None:
        """End the engine and its processes, whatever state they are in."""
        with suppress(Exception):
            self._llm.llm_engine.engine_core.shutdown()
        self._caller.close()
        del self._llm
        end(self._processes, _CLOSE_SECONDS)

    def _ask(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        ended: Callable[[int], bool],
        top: int | None,
        salt: str | None,
        end_ids: Collection[int],
    ) -> Asked:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        engine, request_id = self._llm.llm_engine, f"kvaudit-{self._asked}"
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            logprobs=top,
            detokenize=False,
            ignore_eos=True,
            stop_token_ids=sorted(end_ids),
            output_kind=RequestOutputKind.DELTA,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
        if salt is not None:
            prompt["cache_salt"] = salt
        began, asked = perf_counter(), Asked()
        engine.add_request(request_id, prompt, sampling)
        while True:
            for output in engine.step():
                for token in _tokens(output):
                    asked.tokens.append(token)
                    if asked.ttft_ms is None:
                        asked.ttft_ms = _ttft_ms(output)
                    if ended(token.token_id) or len(asked.tokens) == max_tokens:
                        asked.total_ms = 1000 * (perf_counter() - began)
                        if not output.finished:  # a stop string, which ends a request of vLLM's own in this way too
                            engine.abort_request([request_id])
                        return asked
                if output.finished:
                    raise EngineError(
                        f"vLLM ended a request after {len(asked.tokens)} tokens: {output.outputs[0].finish_reason}"
                    )

    def _answer(self, what: str, work: Callable[[], T]) -> T:
        with _naming(what, self._launch.log):
            return self._caller.call(work, self._launch.answer_seconds, self._processes)


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The end of an engine's log, for people."""
    try:
        lines = log.read_text("utf-8", "replace").rstrip().split("\n")[-count:]
    except OSError:
        return ""
    return "\n".join(line[:_LONGEST_LINE] for line in lines)


def _llm(launch: Launch) -> Any:
    import vllm

    try:
        return vllm.LLM(**launch.arguments)
    finally:
        _log_to(launch.log)  # vLLM sets its loggers up when it is imported and when it starts


def _log_to(log: Path) -> None:
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.addHandler(logging.FileHandler(log, delay=True))
        logger.propagate = False


def _tokens(output: Any) -> list[Token]:
    made = output.outputs[0]
    rows = made.logprobs or [{}] * len(made.token_ids)
    cached = output.num_cached_tokens or 0
    return [
        Token(token_id, {token: given.logprob for token, given in _by_rank(row)}, cached)
        for token_id, row in zip(made.token_ids, rows, strict=True)
    ]


def _by_rank(row: Mapping[int, Any]) -> list[tuple[int, Any]]:
    return sorted(row.items(), key=lambda item: (item[1].rank, item[0]))


def _ttft_ms(output: Any) -> float | None:
    seconds = getattr(output.metrics, "first_token_latency", None)
    return 1000 * float(seconds) if seconds else None


@contextmanager
def _naming(what: str, log: Path) -> Iterator[None]:
    """Any failure becomes one that says `what` and shows the end of the log."""
    try:
        yield
    except KvauditError:
        raise
    except (Exception, SystemExit) as error:
        lines = last_lines(log)
        raise EngineError(
            f"vLLM {what}: {_said(error)}", f"its log is {log}" + (f"; it ends\n{lines}" if lines else "")
        ) from error


def _said(error: BaseException) -> str:
    first = next(iter(str(error).strip().split("\n")), "")
    if isinstance(error, LostError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within it these variables are set, for the processes that are started there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Standard output and error of this process go to a file, and for good those of processes that it starts there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with log.open("a", encoding="utf-8") as file:
        try:
            for descriptor in kept:
                os.dup2(file.fileno(), descriptor)
            with redirect_stdout(file), redirect_stderr(file):
                yield
        finally:
            for descriptor, saved in kept.items():
                os.dup2(saved, descriptor)
                os.close(saved)
