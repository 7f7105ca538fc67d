"""What changed since an earlier run, as lines and cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvaudit.reports.escape import visible
from kvaudit.reports.words.findings import SEEN
from kvaudit.reports.words.numbers import counted, interval, names, p_value, percent

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit
    from kvaudit.analysis.baseline import Baseline, Change, Flips

MOST_FLIPS = 20


def baseline_lines(audit: Audit, baseline: Baseline) -> list[str]:
    """What was held against what, and what became of the findings."""
    trace = baseline.manifest.get("trace")
    source = trace.get("source") if isinstance(trace, Mapping) else None
    finished = visible(str(baseline.manifest.get("finished") or "never"))
    lines = [
        f"The baseline replayed {visible(str(source))}, finished {finished}.",
        f"{counted(baseline.requests, 'request')} have the same prompt in both runs; {baseline.only_now:,} only now, "
        f"{baseline.only_before:,} only before.",
    ]
    seen_before = {finding.policy: SEEN[finding.seen] for finding in baseline.findings}
    for finding in audit.findings:
        before = seen_before.get(finding.policy, "not audited")
        lines.append(f"{visible(finding.policy)}: was {before}, is {SEEN[finding.seen]}.")
    lines += [f"{visible(policy)}: no longer audited." for policy in baseline.policies_only_before]
    if baseline.unpaired:
        orders = [f"{policy} {order}" for policy, order in baseline.unpaired]
        lines.append(f"Not replayed alike in the baseline, and so not compared: {names(orders)}.")
    if not baseline.changes:
        lines.append("Nothing could be paired: the runs share no request, policy and order.")
    return lines


def setting_lines(baseline: Baseline) -> list[str]:
    """Settings, versions and engine facts that differ, a line each."""
    return [
        f"{visible(setting.name)}: {_setting_value(setting.before)} -> {_setting_value(setting.now)}"
        for setting in baseline.settings
    ]


def change_cells(change: Change) -> list[str]:
    """A changed figure as cells: before, now, points, 95 % interval, Holm-adjusted p-value."""
    figure = change.figure
    points = "-" if figure.value is None else f"{100 * figure.value:+.1f}"
    return [percent(change.before), percent(change.now), points, interval(figure), p_value(figure.p_adjusted)]


def flips_line(flips: Flips) -> str:
    """Which requests change with the order now and did not before, and the reverse."""
    parts = [
        f"{counted(len(ids), 'request')} {what}" + (f": {names(ids, MOST_FLIPS)}" if ids else "")
        for ids, what in ((flips.newly, "newly flip"), (flips.no_longer, "no longer do"))
    ]
    return f"{visible(flips.policy)}: {'; '.join(parts)}."


def _setting_value(value: object) -> str:
    return "unset" if value is None else visible(str(value))
