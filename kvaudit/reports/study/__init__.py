"""Reports of a study: frontier, what each cell cost, and what budgets or switches come to. Gates do not apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from kvaudit.reports.study import csv, json, terminal

if TYPE_CHECKING:
    from kvaudit.study.results import StudyResults

FORMATS: Mapping[str, Callable[[StudyResults, TextIO], None]] = MappingProxyType(
    {"terminal": terminal.render, "json": json.render, "csv": csv.render}
)
