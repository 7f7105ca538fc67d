"""Folders of logs: their files, and what is said of one that cannot be read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvaudit.errors import TraceError

_SUBJECT = re.compile(r"^(?: is |, | |: )")


def files_in(folder: Path, leave: Path | None = None) -> list[Path]:
    """Every file of a folder and of those in it, in the order of their paths, but hidden ones and `leave`.

    A folder that cannot be listed stands among them, and is refused as it is opened. Raises TraceError where there are
    none.
    """
    left = leave.resolve() if leave is not None else None
    found = sorted(path for path in _walk(folder) if left is None or path.resolve() != left)
    if not found:
        raise TraceError(f"{folder} is a folder without files")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    unlisted: list[OSError] = []
    for parent, folders, names in os.walk(folder, onerror=unlisted.append):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and _is_file(Path(parent, name)))
    yield from (Path(error.filename) for error in unlisted)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # it may not be looked at: opening it says why
        return True


def reason_of(refusal: TraceError, name: str) -> str:
    """What a refusal says, without the name of the file before it."""
    return _SUBJECT.sub("", refusal.message.removeprefix(name))
