"""What the commands that write a trace say in the end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kvaudit.traces.writer import Written


def say(text: str) -> None:
    typer.echo(text, err=True)


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def say_written(output: Path, written: Written) -> None:
    say(
        f"wrote {output}: {counted(written.requests, 'request')}, "
        f"{counted(written.distinct_segments, 'distinct segment')}, {counted(written.sessions, 'session')}"
    )
    say(f"next: kvaudit replay {shlex.quote(str(output))} --orders 5")
