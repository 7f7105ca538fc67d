"""Reports: one file (or folder) a format, each rendering the same Audit, one line each in `plugins.py`.

`words` turns codes and numbers into sentences and `escape` makes foreign text harmless, for every format alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    import pyarrow as pa

    from kvaudit.analysis.audit import Audit


class Report(Protocol):
    """Write the audit to `out` as text, ended by a line feed. Nothing else is written anywhere.

    `out` may be a terminal: `out.isatty()` says so. Text of requests and engines (answers, ids, settings) is
    foreign: it may hold control characters, and a format must make them harmless.
    """

    def __call__(self, audit: Audit, out: TextIO) -> None: ...


class RunParts(Protocol):
    """The tables behind an audit, read a part at a time: one an arm, or the whole of a table that has no arms."""

    def parts(self, name: str) -> Iterator[tuple[str, pa.Table]]:
        """The parts of a table of `schema.TABLES` with their file names, of finished arms only."""
        ...


class FolderReport(Protocol):
    """Write the audit and the run's tables into `folder`, which is empty. A report whose suffix is `/`."""

    def __call__(self, audit: Audit, run: RunParts, folder: Path) -> None: ...
