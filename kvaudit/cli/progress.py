"""Progress of a replay on stderr, for people: silent when piped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvaudit.errors import KvauditError

if TYPE_CHECKING:
    import rich.progress

    from kvaudit.replay import Progress


class ReplayInterruptedError(KvauditError):
    """Stopped with Ctrl-C: 128 + SIGINT, as every shell expects."""

    exit_code = 130


@contextmanager
def progress_on_stderr() -> Iterator[Progress | None]:
    """A bar over all requests of all arms while the block runs; None where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
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
