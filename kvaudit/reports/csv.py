"""Every figure as a row: the `summary` table as RFC 4180, empty where a value is null, numbers as exact as they are.

Text that a spreadsheet would run gets an apostrophe in front, control characters are shown as backslash escapes.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TextIO

from kvaudit.reports.escape import visible

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

FORMULA_STARTS = frozenset("=+-@＝＋－＠")
"""How a cell begins that a spreadsheet takes for a formula; some take the full-width forms as well."""


def render(audit: Audit, out: TextIO) -> None:
    """Write the `summary` table to `out`: a header, then a row for each figure, lines ended by CR LF."""
    table = audit.summary
    rows = csv.writer(out)
    rows.writerow(table.column_names)
    for batch in table.to_batches():
        columns = (batch.column(name).to_pylist() for name in batch.schema.names)
        rows.writerows(map(harmless_cell, row) for row in zip(*columns, strict=True))


def harmless_cell(value: str | float | None) -> str | float | None:
    return _harmless(value) if isinstance(value, str) else value


def _harmless(text: str) -> str:
    runs = text[:1] in {"\t", "\r"} or text.lstrip()[:1] in FORMULA_STARTS
    return f"'{visible(text)}" if runs else visible(text)
