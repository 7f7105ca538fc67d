"""Where reports go: to stdout, to files that are either whole or as they were, to folders, to a step summary."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from kvaudit.errors import RunError, UsageError
from kvaudit.plugins import BUILT_IN, find

if TYPE_CHECKING:
    from typing import TextIO
TERMINAL = "terminal"
STDOUT = Path("-")
FOLDER_SUFFIX = "/"
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
_ELSEWHERE = "choose another place with -o"
_FOLDER_MARKS = frozenset({"manifest.json", "README.md"})
_FOLDER_TEXTS = ("schema.md", "queries.sql")


class Destination(NamedTuple):
    """A report's format and where it goes; `path` is None for stdout."""

    format: str
    path: Path | None

    @property
    def is_folder(self) -> bool:
        return find("reports", self.format).suffix == FOLDER_SUFFIX


def destinations(formats: Sequence[str], outputs: Sequence[Path]) -> list[Destination]:
    """Pair `--format` and `--output`, each in the order in which they were given.

    Without outputs the one format goes to stdout; without formats the outputs' names say which they are. Raises
    UsageError for an unknown format, for counts that do not match, and for places that two reports would share.
    """
    if not outputs:
        if len(formats) > 1:
            raise UsageError(
                f"{len(formats)} formats and no --output", "give each format an -o of its own (- is stdout)"
            )
        chosen = [Destination(formats[0] if formats else TERMINAL, None)]
    elif not formats:
        chosen = [Destination(_format_of(path), path) for path in outputs]
    elif len(formats) == len(outputs):
        chosen = [Destination(name, path) for name, path in zip(formats, outputs, strict=True)]
    else:
        raise UsageError(
            f"{len(formats)} formats and {len(outputs)} outputs", "give each --format an --output, in order"
        )
    chosen = [Destination(name, None if path == STDOUT else path) for name, path in chosen]
    for destination in chosen:
        if destination.is_folder and destination.path is None:
            raise UsageError(f"a {destination.format} report is a folder", "say where with -o FOLDER")
    places = [None if path is None else path.resolve() for _, path in chosen]
    if len(set(places)) < len(places):
        raise UsageError("two reports go to the same place", "give each an -o of its own")
    return chosen


def print_report(render: Callable[[TextIO], None], *, escapes: bool) -> None:
    """Write to stdout: escaped where its encoding falls short when people read it, in UTF-8 when programs do."""
    out = sys.stdout
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(**({"errors": "backslashreplace"} if escapes else {"encoding": "utf-8"}))
    render(out)
    out.flush()


def write_file(render: Callable[[TextIO], None], output: Path) -> None:
    """Write a file that is either whole or as it was. Raises RunError when it cannot be written."""
    with _refusals(output):
        if _is_device(output):  # nothing to replace
            with open(output, "w", encoding="utf-8") as file:
                render(file)
            return
        path = output.resolve()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8", newline="") as file:
                render(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_folder(write: Callable[[Path], None], output: Path) -> None:
    """Write a folder that is either whole or as it was.

    Raises RunError when it holds anything that a folder report does not write, and when it cannot be written.
    """
    path = output.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    with _refusals(output):
        _check_replaceable(path, output)
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            if path.exists():
                os.replace(path, replaced)
            os.replace(temporary, path)
        finally:
            if replaced.exists() and not path.exists():
                os.replace(replaced, path)
            for left in (temporary, replaced):
                shutil.rmtree(left, ignore_errors=True)


def _check_replaceable(path: Path, output: Path) -> None:
    from kvaudit.schema import TABLES

    if path.exists() and not path.is_dir():
        raise RunError(f"{output} is a file", _ELSEWHERE)
    held = {entry.name for entry in path.iterdir()} if path.exists() else set()
    ours = {*_FOLDER_MARKS, *_FOLDER_TEXTS, *TABLES, *(f"{name}.parquet" for name in TABLES)}
    if held and (held - ours or not held >= _FOLDER_MARKS):
        raise RunError(f"{output} is not empty and was not written by `kvaudit report`", _ELSEWHERE)


def append_step_summary(text_within: Callable[[int], str], limit: int) -> None:
    """Add to the summary that GitHub shows for a step, as much as what it holds already leaves room for."""
    name = os.environ.get(STEP_SUMMARY)
    if not name:
        typer.echo(f"kvaudit: no step summary is written: {STEP_SUMMARY} is not set", err=True)
        return
    path = Path(name)
    with _refusals(path):
        held = path.read_bytes() if path.exists() else b""
        between = "" if held.endswith(b"\n") or not held else "\n"
        text = text_within(limit - len(held) - len(between))
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(between + text)


def _format_of(path: Path) -> str:
    if path == STDOUT or not path.suffix:
        return TERMINAL
    for plugin in BUILT_IN["reports"].values():
        if plugin.suffix != FOLDER_SUFFIX and path.suffix.lower() == plugin.suffix:
            return plugin.name
    known = ", ".join(plugin.suffix for plugin in BUILT_IN["reports"].values() if plugin.suffix != FOLDER_SUFFIX)
    raise UsageError(f"{path} does not say which format it should have", f"add --format, or end it in one of {known}")


def _is_device(path: Path) -> bool:
    """A pipe, a terminal or another device, which is written to and not replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _refusals(output: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}", _ELSEWHERE) from error
