"""What the commands that write a trace say in the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvaudit.errors import UsageError

if TYPE_CHECKING:
    from kvaudit.traces.writer import Written


def say(text: str) -> None:
    typer.echo(text, err=True)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def refuse_to_replace_input(files: Iterable[Path], output: Path) -> None:
    """Raises UsageError where a file that is read would be replaced by what is written."""
    with suppress(OSError):  # what cannot be looked at is refused where it is read or written
        for file in files:
            if str(file) != "-" and file.exists() and output.exists() and file.samefile(output):
                raise UsageError(f"{output} is read, and would be replaced", "name another file with -o")


def say_written(output: Path, written: Written) -> None:
    say(
        f"wrote {output}: {counted(written.requests, 'request')}, "
        f"{counted(written.distinct_segments, 'distinct segment')}, {counted(written.sessions, 'session')}"
    )
    if written.requests > 1:
        orders = 5 if written.requests > 2 else 2
        say(f"next: kvaudit replay {shlex.quote(str(output))} --orders {orders}")
    else:
        say("one request has one order: record more to see history")
