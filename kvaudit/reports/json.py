"""The audit as data: one JSON object with stable keys, UTF-8, undefined numbers as null.

`report_version` counts changes of this layout. `figures` are the rows of the `summary` table
(kvaudit.analysis.figures and kvaudit.analysis.costs say what each metric is), `answers` in `examples` are cut to their
first 10,000 characters, `characters` says how long they are.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from kvaudit import __version__
from kvaudit.analysis.checks import Reason
from kvaudit.analysis.examples import Example
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.gates import GateResult
from kvaudit.reports.words.findings import finding_details, finding_line, reason_sentence
from kvaudit.reports.words.gates import gate_sentence

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

REPORT_VERSION = 1
LONGEST_TEXT = 10_000


def render(audit: Audit, out: TextIO) -> None:
    """Write the audit to `out` as indented JSON."""
    _dump(as_data(audit), out)


def render_baseline(audit: Audit, out: TextIO) -> None:
    """Write only what changed since the audit's baseline."""
    head = {"report_version": REPORT_VERSION, "kvaudit_version": __version__}
    _dump({**head, "baseline": _baseline(audit)}, out)


def _dump(data: dict[str, Any], out: TextIO) -> None:
    out.write(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


def as_data(audit: Audit) -> dict[str, Any]:
    manifest = audit.manifest
    return {
        "report_version": REPORT_VERSION,
        "schema_version": manifest.get("schema_version"),
        "kvaudit_version": __version__,
        "verdict": {
            "outcome": audit.verdict.outcome,
            "exit_code": audit.verdict.exit_code,
            "gates": [_gate(result) for result in audit.verdict.gates],
        },
        "findings": [_finding(finding, audit) for finding in audit.findings],
        "trace": manifest.get("trace"),
        "engine": manifest.get("engine"),
        "settings": manifest.get("settings"),
        "libraries": manifest.get("libraries"),
        "requests": audit.requests,
        "arms": [
            {
                "arm_id": arm.arm_id,
                "policy": arm.policy,
                "order": arm.order,
                "control": arm.control,
                "finished": arm.finished,
            }
            for arm in audit.arms
        ],
        "figures": [asdict(figure) for figure in audit.figures],
        "examples": [_example(example) for example in audit.examples],
        "gates_from": audit.gates.source,
        "baseline": _baseline(audit),
    }


def _baseline(audit: Audit) -> dict[str, Any] | None:
    baseline = audit.baseline
    if baseline is None:
        return None
    return {
        "trace": baseline.manifest.get("trace"),
        "finished": baseline.manifest.get("finished"),
        "requests": baseline.requests,
        "only_now": baseline.only_now,
        "only_before": baseline.only_before,
        "policies_only_now": baseline.policies_only_now,
        "policies_only_before": baseline.policies_only_before,
        "unpaired": [{"policy": policy, "order": order} for policy, order in baseline.unpaired],
        "findings": [{"policy": finding.policy, "seen": finding.seen} for finding in baseline.findings],
        "settings": [asdict(setting) for setting in baseline.settings],
        "changes": [
            {"before": change.before, "now": change.now, **asdict(change.figure)} for change in baseline.changes
        ],
        "flips": [asdict(flips) for flips in baseline.flips],
    }


def _gate(result: GateResult) -> dict[str, Any]:
    return {**asdict(result), "sentence": gate_sentence(result)}


def _finding(finding: Finding, audit: Audit) -> dict[str, Any]:
    return {
        **asdict(finding),
        "reasons": [_reason(reason) for reason in finding.reasons],
        "sentence": finding_line(finding, audit.figures),
        "details": finding_details(finding),
    }


def _reason(reason: Reason) -> dict[str, Any]:
    return {**asdict(reason), "sentence": reason_sentence(reason)}


def _example(example: Example) -> dict[str, Any]:
    data = asdict(example)
    reference = data.pop("reference_text")
    data["reference"] = _text(reference)
    data["answers"] = [{**answer, **_text(answer.pop("text"))} for answer in data["answers"]]
    return data


def _text(text: str | None) -> dict[str, Any]:
    return {"text": text if text is None else text[:LONGEST_TEXT], "characters": None if text is None else len(text)}
