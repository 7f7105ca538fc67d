"""Holding a folder against every other process, and refusing one in which something else lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from kvaudit.errors import RunError
from kvaudit.store.layout import ENGINE_LOGS, LOCK, TEMPORARY

Difference = tuple[str, object, object]
ELSEWHERE = "choose another folder with -o"


@contextmanager
def held(
    path: Path, mark: str, read: Callable[[Path], object], *, writer: str, holds: str, below: str | None = None
) -> Iterator[None]:
    """Hold a folder while the block runs, made where it is missing. No second process holds it meanwhile.

    `mark` is the file that makes the folder a `writer`'s, which `read` reads or refuses with RunError; `below` a
    folder in it that is made before `mark` is. Without `mark` at the end nothing stays that was made here. Raises
    RunError when another process holds the folder, for a file, and for a folder that `holds` something else.
    """
    _check_replaceable(path, mark, read, holds, below)
    created = not path.exists()
    with refusals(path):
        path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / LOCK, blocking=False)
    try:
        with refusals(path):
            lock.acquire()
    except Timeout as error:
        raise RunError(f"another {writer} is writing to {path}", f"wait until it is done, or {ELSEWHERE}") from error
    try:
        yield
    finally:
        (path / f"{mark}{TEMPORARY}").unlink(missing_ok=True)
        if not (path / mark).exists():
            (path / LOCK).unlink(missing_ok=True)
            if below is not None:
                _remove_empty(path / below)
        lock.release()
        if created:
            _remove_empty(path)


def check_same_engine(path: Path, began_with: Mapping[str, object] | None, facts: Mapping[str, object]) -> None:
    """Raises RunError when another engine than the one that these facts describe began what the folder holds."""
    if began_with is None or began_with == facts:
        return
    told = ", ".join(f"{name} was {was}, is {now}" for name, was, now in differences(began_with, facts))
    raise RunError(
        f"{path} was begun with another engine: {told}", f"make that as it was, {ELSEWHERE}, or --force to replace it"
    )


def differences(before: Mapping[str, object], now: Mapping[str, object], within: str = "") -> Iterator[Difference]:
    """What is another value than before, by its name; of groups of values the very ones that are."""
    for name in sorted({*before, *now}):
        was, became = before.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(became, Mapping):
            yield from differences(was, became, f"{within}{name}.")
        elif was != became:
            yield f"{within}{name}", was, became


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """The system's refusal to write becomes a RunError."""
    try:
        yield
    except Timeout:
        raise
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}", ELSEWHERE) from error


def _check_replaceable(path: Path, mark: str, read: Callable[[Path], object], holds: str, below: str | None) -> None:
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file", ELSEWHERE)
    with refusals(path):
        names = {entry.name for entry in path.iterdir()} if path.exists() else set()
        if mark not in names and below is not None and below in names and not any((path / below).iterdir()):
            names.remove(below)
    if mark in names:
        read(path)
    elif names - {LOCK, f"{mark}{TEMPORARY}", ENGINE_LOGS}:
        raise RunError(f"{path} is not empty and holds no {holds}", ELSEWHERE)


def _remove_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()
