"""The page from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvaudit.analysis.audit import section
from kvaudit.reports.html import answers, context, contrasts, damage, evidence, work
from kvaudit.reports.html.parts import Section, short
from kvaudit.reports.words.numbers import counted

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def sections(audit: Audit) -> Iterator[Section]:
    yield context.baseline(audit)
    yield context.settings(audit)
    yield from answers.sections(audit)
    yield from contrasts.sections(audit)
    yield from damage.sections(audit)
    yield evidence.section(audit)
    yield from work.sections(audit)
    yield answers.controls(audit)


def facts(audit: Audit) -> list[str]:
    """The run in a few words, for the line under the title."""
    trace, settings = section(audit.manifest, "trace"), section(audit.manifest, "settings")
    orders = dict.fromkeys(arm.order for arm in audit.arms)
    named = [str(value) for value in (trace.get("source"), settings.get("engine"), settings.get("model")) if value]
    policies = "policy" if len(audit.grid.policies) == 1 else "policies"
    return [
        *(short(name) for name in named),
        counted(audit.requests, "request"),
        f"{len(audit.grid.policies):,} {policies}",
        counted(len(orders), "order"),
    ]
