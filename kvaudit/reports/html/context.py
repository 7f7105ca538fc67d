"""Sections about the run itself: what was audited, and what changed since the baseline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvaudit.analysis.audit import section
from kvaudit.analysis.baseline import Baseline, Flips
from kvaudit.reports.escape import excerpt
from kvaudit.reports.html.contrasts import contrast
from kvaudit.reports.html.parts import Section, Table, short, table
from kvaudit.reports.words.baseline import baseline_lines
from kvaudit.reports.words.figures import condition
from kvaudit.reports.words.numbers import counted, names, percent

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

DIGEST_DIGITS = 12
"""Digits of a SHA-256 that are shown; the JSON report has them all."""
LONGEST_VALUE = 200
MOST_FLIPS = 20


def settings(audit: Audit) -> Section:
    """What was audited: a table for each part of the manifest, a fact that two parts share in the first only."""
    chosen = dict(section(audit.manifest, "settings"))
    switches, options = (chosen.pop(name, None) for name in ("switches", "options"))
    groups: dict[str, Any] = {
        "Settings": chosen,
        "Engine switches": switches,
        "Engine options": options,
        "Trace": section(audit.manifest, "trace"),
        "Engine": section(audit.manifest, "engine"),
        "Libraries": section(audit.manifest, "libraries"),
        "Host": section(audit.manifest, "host"),
    }
    told: dict[str, Any] = {"switches": switches, "options": options}
    tables: list[Table] = []
    folded = ("Engine", "Libraries", "Host")
    for title, values in groups.items():
        if not isinstance(values, Mapping):
            continue
        rows = [
            [_words(name), _value(value)]
            for name, value in values.items()
            if name not in told or told[name] != value or title == "Engine switches"
        ]
        told |= {name: value for name, value in values.items() if name not in told}
        tables += [replace(made, aside=title in folded) for made in table(title, ("name", "value"), rows, labels=2)]
    finished = sum(arm.finished for arm in audit.arms)
    notes = (f"{finished:,} of {counted(len(audit.arms), 'arm')} finished; {counted(audit.requests, 'request')}.",)
    return Section("settings", "What was audited", tables=tuple(tables), notes=notes)


def baseline(audit: Audit) -> Section:
    found = audit.baseline
    if found is None:
        return Section("baseline", "")
    return Section(
        "baseline",
        "What changed since the baseline",
        tuple(baseline_lines(audit, found)),
        tables=(*_settings(found), *_changes(found), *_flips(found)),
        notes=() if found.settings else ("No setting, library or engine fact changed.",),
    )


def _settings(found: Baseline) -> list[Table]:
    rows = [[short(setting.name), _value(setting.before), _value(setting.now)] for setting in found.settings]
    return table("Settings that changed", ("setting", "before", "now"), rows, labels=3)


def _changes(found: Baseline) -> list[Table]:
    rows = []
    for change in found.changes:
        figure = change.figure
        metric = "answer variation" if figure.metric == "variation_change" else "fidelity"
        where = condition(figure) if figure.order else "shared orders"
        shares = [percent(change.before), percent(change.now)]
        rows.append([metric, short(figure.policy), where, *shares, *contrast(figure)])
    columns = (
        "figure",
        "policy",
        "order",
        "before",
        "now",
        "points",
        "95 % interval",
        "now : before",
        "p",
        "p (Holm)",
    )
    notes = [
        "On the requests of both runs. Points: now less before. Now : before: requests that equal full prefill only "
        "now, and only before."
    ]
    return table("Figures that can be paired", columns, rows, notes, labels=3)


def _flips(found: Baseline) -> list[Table]:
    rows = [
        [short(flips.policy), *_named(flips), f"{len(flips.newly):,}", f"{len(flips.no_longer):,}"]
        for flips in found.flips
    ]
    columns = ("policy", "newly", "no longer", "newly, in all", "no longer, in all")
    notes = ["Requests that change with the order now and did not before, and the reverse."]
    return table("Requests that change with the order", columns, rows, notes, labels=3)


def _named(flips: Flips) -> list[str]:
    return [
        names([short(request) for request in requests], MOST_FLIPS) if requests else "-"
        for requests in (flips.newly, flips.no_longer)
    ]


def _words(name: object) -> str:
    return short(str(name).replace("_", " "))


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return f"{value[:DIGEST_DIGITS]}..."
    if isinstance(value, Mapping):
        return ", ".join(f"{_words(name)} {_value(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return excerpt(str(value), length=LONGEST_VALUE)
