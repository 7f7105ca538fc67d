"""Progress of a replay on stderr: a bar for people, a line for each finished arm when piped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, TextIO

from kvaudit.errors import KvauditError

if TYPE_CHECKING:
    import rich.progress

    from kvaudit.replay import Progress


class ReplayInterruptedError(KvauditError):
    """Stopped with Ctrl-C: 128 + SIGINT, as every shell expects."""

    exit_code = 130


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A bar over all requests of all arms while the block runs; a line for each arm where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        lines = _Lines(sys.stderr)
        yield lines
        lines.finished()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    shortened = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", markup=False, table_column=shortened),
        BarColumn(bar_width=10),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("requests, left:"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as shown:
        yield _Bar(shown)


class _Bar:
    def __init__(self, shown: rich.progress.Progress) -> None:
        self._shown = shown
        self._task = shown.add_task("opening the engine", total=None)

    def begin(self, total: int, done: int) -> None:
        self._shown.update(self._task, total=total, completed=done)

    def arm(self, arm_id: str, number: int, arms: int) -> None:
        self._shown.update(self._task, description=f"arm {number} of {arms}, {arm_id}")

    def served(self) -> None:
        self._shown.advance(self._task)


class _Lines:
    """An arm is told when all its requests are served and the next one begins, or the block ends."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out
        self._total, self._left = 0, 0
        self._arm, self._requests, self._began = "", 0, 0.0

    def begin(self, total: int, done: int) -> None:
        self.finished()
        self._total = total

    def arm(self, arm_id: str, number: int, arms: int) -> None:
        self.finished()
        self._arm, self._requests, self._began = (
            f"arm {number} of {arms}, {arm_id}",
            self._total // arms,
            perf_counter(),
        )
        self._left = self._requests

    def served(self) -> None:
        self._left -= 1

    def finished(self) -> None:
        if self._arm and not self._left and self._out is not None:
            took = perf_counter() - self._began
            print(f"{self._arm}: finished, {self._requests:,} requests in {took:.1f} s", file=self._out, flush=True)
        self._arm = ""
