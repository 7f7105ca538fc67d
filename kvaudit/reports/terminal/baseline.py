"""What changed since the run that this one is held against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from kvaudit.analysis.baseline import Baseline
from kvaudit.reports.terminal.layout import condition, grouped_table, heading, place_of, sentences
from kvaudit.reports.words.baseline import baseline_lines, change_cells, flips_line, setting_lines

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def parts(audit: Audit) -> Iterator[RenderableType]:
    if audit.baseline is None:
        return
    yield from heading("Against the baseline: what changed")
    yield from sentences(baseline_lines(audit, audit.baseline))
    yield from heading("Settings and versions that changed")
    yield from sentences(setting_lines(audit.baseline) or ["None."])
    yield from _figures(audit.baseline)
    if audit.baseline.flips:
        yield from heading("Requests that flip")
        yield from sentences([flips_line(flips) for flips in audit.baseline.flips])


def _figures(baseline: Baseline) -> Iterator[RenderableType]:
    columns = ("before", "now", "points", "95 % interval", "p (Holm)")
    for metric, title in (("fidelity_change", "Fidelity"), ("variation_change", "Answer variation")):
        changes = [change for change in baseline.changes if change.figure.metric == metric]
        if not changes:
            continue
        yield from heading(f"{title}, now and before, on the same requests")
        rows = [
            [change.figure.policy or "", condition(place_of(change.figure)) or "shared orders", *change_cells(change)]
            for change in changes
        ]
        yield grouped_table(("policy, order", *columns), rows)
