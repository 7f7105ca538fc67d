"""The processes that an engine runs in: how they are ended, and calls to them that may never come back.

vLLM's client waits without end for a process that was killed, by the system for want of memory for instance, and for
one that hangs. Calls are therefore made in a thread of their own, which is left behind when that happens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, TypeVar

_LOOK_SECONDS = 0.5
_LAST_WORDS_SECONDS = 3.0
"""How long vLLM may take to say itself that its process ended."""

T = TypeVar("T")
_Outcome = tuple[Any, BaseException | None]


class LostError(Exception):
    """The process ended or hangs."""


class Caller:
    """One call at a time, in a thread that does not keep Python from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[_Outcome]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="kvaudit-vllm", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T], seconds: float, processes: Iterable[Any]) -> T:
        """What `work` returns or raises. Raises LostError when one of the processes has ended, and after `seconds`,
        when they are ended."""
        outcome: SimpleQueue[_Outcome] = SimpleQueue()
        self._calls.put((work, outcome))
        deadline = monotonic() + seconds
        while True:
            ended = any(not is_alive(process) for process in processes)
            with suppress(Empty):
                made: T = _taken(outcome, _LAST_WORDS_SECONDS if ended else _LOOK_SECONDS)
                return made
            if ended and any(not is_alive(process) for process in processes):
                raise LostError("its process ended")
            if monotonic() >= deadline:
                end(processes, patience=0.0)
                raise LostError(f"it gave no answer for {seconds:.0f} s and was ended")

    def close(self, patience: float = 0.0) -> None:
        """No call comes any more; one under way is waited for, so many seconds."""
        self._calls.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            work, outcome = call
            try:
                outcome.put((work(), None))
            except BaseException as error:
                outcome.put((None, error))


def children() -> list[Any]:
    """This process's children and theirs, without Python's own resource tracker, which ends with this process."""
    return [child for child in _psutil().Process().children(recursive=True) if not _is_tracker(child)]


def is_alive(process: Any) -> bool:
    try:
        return bool(process.is_running() and process.status() != _psutil().STATUS_ZOMBIE)
    except _psutil().Error:
        return False


class Started:
    """This process's children that were not there before, each time as they are then."""

    def __init__(self) -> None:
        self._before: Collection[Any] = children()

    def __iter__(self) -> Iterator[Any]:
        return iter([child for child in children() if child not in self._before])


def end(processes: Iterable[Any], patience: float) -> None:
    """Wait for processes to end, so many seconds, then end them."""
    psutil = _psutil()
    _, alive = psutil.wait_procs(list(processes), timeout=patience)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def _taken(outcome: SimpleQueue[_Outcome], seconds: float) -> Any:
    made, error = outcome.get(timeout=seconds)
    if error is not None:
        raise error
    return made


def _is_tracker(process: Any) -> bool:
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except _psutil().Error:
        return False


def _psutil() -> Any:
    """vLLM brings it."""
    return import_module("psutil")
