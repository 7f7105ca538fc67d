"""A study's rows as RFC 4180: a line for each policy of each cell, empty where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from csv import writer
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TextIO

from kvaudit.engines import Switches
from kvaudit.reports.csv import harmless_cell
from kvaudit.reports.study.json import as_data

if TYPE_CHECKING:
    from kvaudit.study.results import StudyResults

ESTIMATES = ("fidelity", "mean_fidelity", "answer_variation", "ttft_speedup")
SWITCHES = tuple(field.name for field in fields(Switches))
PLAIN = ("ttft_ms", "kl", "fragmentation", "captured_deviation", "reuse_share")


def render(results: StudyResults, out: TextIO) -> None:
    """Write a header, then a row for each policy of each cell, lines ended by CR LF."""
    rows = writer(out)
    rows.writerow(
        [
            *("cell", "policy", "recompute_ratio", *SWITCHES, "standing", "seen"),
            *(f"{name}{part}" for name in ESTIMATES for part in ("", "_low", "_high")),
            *PLAIN,
        ]
    )
    for row in as_data(results)["rows"]:
        rows.writerow(map(harmless_cell, _values(row)))


def _values(row: dict[str, Any]) -> Iterator[Any]:
    yield from (row["cell"], row["policy"], row["recompute_ratio"])
    yield from (row["switches"][name] for name in SWITCHES)
    yield from (row["standing"], row["seen"])
    for name in ESTIMATES:
        estimate = row[name] or {"value": None, "low": None, "high": None}
        yield from (estimate["value"], estimate["low"], estimate["high"])
    yield from (row[name] for name in PLAIN)
