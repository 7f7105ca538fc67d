"""Folded lists of what changed since the baseline run: settings, figures, requests that flip now and did not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvaudit.analysis.baseline import Baseline, Change
from kvaudit.reports.markdown.layout import Block, code, folded, html_code, prose, table_head, table_row
from kvaudit.reports.markdown.lists import setting_value
from kvaudit.reports.words.baseline import baseline_lines, change_cells
from kvaudit.reports.words.figures import condition
from kvaudit.reports.words.numbers import counted

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

METRICS = {"fidelity_change": "fidelity", "variation_change": "answer variation"}


def baseline_lists(audit: Audit, limit: int) -> Iterator[Block]:
    """Nothing where the audit was not held against another run."""
    baseline = audit.baseline
    if baseline is None:
        return
    yield _changes(audit, baseline)
    if baseline.settings:
        rows = (
            f"- {code(setting.name)}: {setting_value(setting.before)} before, {setting_value(setting.now)} now"
            for setting in baseline.settings
        )
        total = len(baseline.settings)
        yield folded(f"{counted(total, 'setting')} changed since the baseline", rows, total, "settings changed", limit)
    for flips in baseline.flips:
        lists = (
            (flips.newly, "newly changing with the order", "requests newly change"),
            (flips.no_longer, "no longer changing with the order", "requests no longer change"),
        )
        for requests, what, noun in lists:
            if requests:
                summary = f"{html_code(flips.policy)}: {counted(len(requests), 'request')} {what} since the baseline"
                yield folded(summary, (f"- {code(request)}" for request in requests), len(requests), noun, limit)


def _changes(audit: Audit, baseline: Baseline) -> Block:
    facts = "".join(f"- {prose(line)}\n" for line in baseline_lines(audit, baseline))
    head = f"<details>\n<summary>Held against the baseline</summary>\n\n{facts}"
    if not baseline.changes:
        return Block(head, tail="</details>")
    columns = table_head(("Figure", "Policy", "Order", "Before", "Now", "Points", "95 % interval", "p (Holm)"), 3)
    rows = tuple(_change(change) for change in baseline.changes)
    return Block(f"{head}\n{columns}", rows, len(rows), "figures", "Points: now minus before.\n\n</details>")


def _change(change: Change) -> str:
    figure = change.figure
    order = condition(figure) if figure.order else None
    return table_row([METRICS.get(figure.metric, figure.metric), figure.policy, order], change_cells(change))
