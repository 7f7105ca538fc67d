"""Reports: one file (or folder) a format, each rendering the same Audit, one line each in `plugins.py`.

`words` turns codes and numbers into sentences and `escape` makes foreign text harmless, for every format alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


class Report(Protocol):
    """Write the audit to `out` as text, ended by a line feed. Nothing else is written anywhere.

    `out` may be a terminal: `out.isatty()` says so. Text of requests and engines (answers, ids, settings) is
    foreign: it may hold control characters, and a format must make them harmless.
    """

    def __call__(self, audit: Audit, out: TextIO) -> None: ...
