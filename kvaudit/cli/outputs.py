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


class Destination(NamedTuple):
    """A report's format and where it goes; `path` is None for stdout."""

    format: str
    path: Path | None

    @property
    def is_folder(self) -> bool:
        return find("reports", self.format).suffix == FOLDER_SUFFIX


def destinations(formats: Sequence[str], outputs: Sequence[Path], runs: Sequence[Path] = ()) -> list[Destination]:
    """Pair `--format` and `--output`, each in the order in which they were given.

    Without outputs the one format goes to stdout; without formats the outputs' names say which they are. Raises
    UsageError for an unknown format, for counts that do not match, for places that two reports would share, and for
    places in one of the `runs` that are read.
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
    _check_places([path for _, path in chosen], runs)
    return chosen


def _check_places(paths: Sequence[Path | None], runs: Sequence[Path]) -> None:
    with _refusals(Path(".")):
        places = [None if path is None else path.resolve() for path in paths]
        if len(set(places)) < len(places):
            raise UsageError("two reports go to the same place", "give each an -o of its own")
        known = [place for place in places if place is not None]
        for run in (run.resolve() for run in runs):
            for place in known:
                if place.is_relative_to(run) or run.is_relative_to(place):
                    raise UsageError(f"{place} would write into the run {run}", _ELSEWHERE)
        for place in known:
            if any(place != other and place.is_relative_to(other) for other in known):
                raise UsageError(f"{place} lies in another report", _ELSEWHERE)


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
    """Write a folder that is whole or not there. Raises RunError for one that holds anything already."""
    with _refusals(output):
        path = output.resolve()
        if path.exists() and not path.is_dir():
            raise RunError(f"{output} is a file", _ELSEWHERE)
        if path.exists() and any(path.iterdir()):
            raise RunError(f"{output} is not empty", f"remove it, or {_ELSEWHERE}")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.mkdir(parents=True)
            write(temporary)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def exit_code(of_verdict: int, exit_zero: bool) -> int:
    """0 under --exit-zero, which says on stderr what reports say another code of."""
    if exit_zero and of_verdict:
        typer.echo(f"kvaudit: exit code 0 since --exit-zero is set; by the verdict it is {of_verdict}", err=True)
        return 0
    return of_verdict


def append_step_summary(text_within: Callable[[int], str], limit: int) -> None:
    """Add to the summary that GitHub shows for a step, as much as what it holds already leaves room for."""
    name = os.environ.get(STEP_SUMMARY)
    if not name:
        typer.echo(f"kvaudit: no step summary is written: {STEP_SUMMARY} is not set", err=True)
        return
    path = Path(name)
    with _refusals(path):
        if path.exists() and not path.is_file():
            raise RunError(f"{path} is no file that a summary can be added to", f"set {STEP_SUMMARY} to one")
        with open(path, "a+b") as file:
            held = file.seek(0, os.SEEK_END)
            file.seek(max(0, held - 1))
            between = b"" if file.read(1) in (b"", b"\n") else b"\n"
            text = text_within(limit - held - len(between)).encode() if held + len(between) < limit else b""
            if text:
                file.write(between + text)
            else:
                typer.echo(f"kvaudit: nothing was added to the step summary: {path} is full", err=True)


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
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise RunError(f"cannot write {output}: {reason or error}", _ELSEWHERE) from error
