"""Calls to an engine's processes come back, or it is told that they will not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from kvaudit.engines.vllm import processes
from kvaudit.engines.vllm.processes import Caller, LostError


class Process:
    """Stands for a process: it lives until it is killed, or dies at once."""

    def __init__(self, alive=True):
        self.alive = alive

    def is_running(self):
        return True

    def status(self):
        return "sleeping" if self.alive else "zombie"

    def kill(self):
        self.alive = False


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Stands for psutil, and looks often."""

    def wait_procs(waited, timeout):
        return [each for each in waited if not each.alive], [each for each in waited if each.alive]

    fake = SimpleNamespace(Error=LookupError, STATUS_ZOMBIE="zombie", wait_procs=wait_procs)
    monkeypatch.setattr(processes, "_psutil", lambda: fake)
    monkeypatch.setattr(processes, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(processes, "_LAST_WORDS_SECONDS", 0.2)


@pytest.fixture
def caller():
    made = Caller()
    yield made
    made.close()


@pytest.fixture
def never():
    """Work that does not come back until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_what_a_call_returns_comes_back(caller):
    assert (caller.call(lambda: 1, 5, [Process()]), caller.call(lambda: 2, 5, [])) == (1, 2)


def test_what_a_call_raises_comes_back_and_the_next_call_works(caller):
    with pytest.raises(KeyError, match="lost"):
        caller.call(lambda: {}["lost"], 5, [])
    assert caller.call(lambda: "on", 5, []) == "on"


def test_every_call_is_made_in_one_thread_that_does_not_keep_python_from_ending(caller):
    threads = {caller.call(threading.current_thread, 5, []) for _ in range(3)}
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_a_process_that_ended_is_told_at_once(caller, never):
    began = time.monotonic()
    with pytest.raises(LostError, match="its process ended"):
        caller.call(never, 60, [Process(), Process(alive=False)])
    assert time.monotonic() - began < 10


def test_what_the_engine_itself_says_of_its_end_comes_first(caller):
    def say():
        time.sleep(0.05)
        raise RuntimeError("EngineDead")

    with pytest.raises(RuntimeError, match="EngineDead"):
        caller.call(say, 60, [Process(alive=False)])


def test_a_process_that_hangs_is_ended(caller, never):
    hanging = Process()
    with pytest.raises(LostError, match="gave no answer for 0 s and was ended"):
        caller.call(never, 0.05, [hanging])
    assert not hanging.alive


def test_work_in_this_process_that_hangs_is_told_too(caller, never):
    with pytest.raises(LostError, match="gave no answer"):
        caller.call(never, 0.05, [])


def test_a_process_that_ends_during_a_start_is_told_and_a_helper_that_ended_as_it_should_is_not(caller, never):
    helpers = iter([[], [Process(alive=False)]])
    assert caller.call(lambda: time.sleep(0.5) or "up", 60, Seen(lambda: next(helpers, []))) == "up"
    engine = Process(alive=False)
    with pytest.raises(LostError, match="its process ended"):
        caller.call(never, 60, Seen(lambda: [engine]))


def test_closing_waits_for_the_call_under_way():
    made, done = Caller(), []
    with pytest.raises(LostError):
        made.call(lambda: time.sleep(0.2) or done.append(True), 0.0, [])
    made.close(5)
    assert done


class Seen:
    """Processes as they are when they are looked at."""

    def __init__(self, look):
        self.look = look

    def __iter__(self):
        return iter(self.look())
