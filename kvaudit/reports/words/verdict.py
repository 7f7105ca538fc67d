"""The verdict in a line, and the audit in a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvaudit.analysis.verdict import Verdict
from kvaudit.reports.escape import visible
from kvaudit.reports.words.findings import finding_line

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def verdict_line(verdict: Verdict) -> str:
    explanations = {
        "pass": "every gate is kept",
        "fail": "a gate is broken",
        "inconclusive": "the audit cannot say",
        "no gates": "no limit is set; the findings stand",
    }
    return f"Verdict: {verdict.outcome} ({explanations[verdict.outcome]}; exit code {verdict.exit_code})"


def gates_source(audit: Audit) -> list[str]:
    """Where limits came from, unless all of them were options."""
    return [f"Limits from {visible(audit.gates.source)}."] if audit.gates.source else []


def headline(audit: Audit) -> list[str]:
    """The audit in a line for each policy and one for the verdict: what `kvaudit replay` prints at its end."""
    lines = [finding_line(finding, audit.figures) for finding in audit.findings]
    return [*(lines or ["No policy was audited."]), *server_lines(audit), verdict_line(audit.verdict)]


def server_lines(audit: Audit) -> list[str]:
    """What the reference and the resets of an audited server rest on; nothing for other engines."""
    engine = audit.manifest.get("engine")
    if not isinstance(engine, Mapping) or "reference" not in engine:
        return []
    told = [f"Full prefill: {engine['reference']}", f"resets seen by {engine.get('reset_verified_by')}"]
    told.append(f"cached tokens from {engine.get('cached_tokens_from')}")
    at_once = engine.get("concurrency")
    told += [f"{at_once} requests at a time, by which answers may differ too"] if at_once != 1 else []
    return [visible("; ".join(told) + ".")]
