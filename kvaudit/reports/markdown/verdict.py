"""What stands first: the verdict, the gates and the findings, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvaudit import __version__
from kvaudit.analysis.audit import section
from kvaudit.analysis.findings import Finding
from kvaudit.reports.markdown.layout import Block, code, in_cell, prose, table_head
from kvaudit.reports.words.findings import details_beside_line, finding_line
from kvaudit.reports.words.gates import gate_sentence
from kvaudit.reports.words.numbers import counted
from kvaudit.reports.words.verdict import gates_source, verdict_line

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def verdict_blocks(audit: Audit) -> Iterator[Block]:
    yield Block(f"## {prose(verdict_line(audit.verdict))}\n\n{_what_was_audited(audit)}")
    gates = [
        f"| {gate.outcome} | {in_cell(prose(gate_sentence(gate).removeprefix(f'{gate.outcome}: ')))} |"
        for gate in audit.verdict.gates
    ]
    if gates:
        source = " ".join(prose(line) for line in gates_source(audit))
        yield Block(f"### Gates\n\n{table_head(('Outcome', 'Gate'), 2)}", tuple(gates), len(gates), "gates", source)
    findings = [_finding(audit, finding) for finding in audit.findings] or ["No policy was audited."]
    yield Block("### Findings\n", tuple(findings), len(findings), "findings")


def _what_was_audited(audit: Audit) -> str:
    finished = sum(arm.finished for arm in audit.arms)
    source, model = section(audit.manifest, "trace").get("source"), section(audit.manifest, "settings").get("model")
    trace = f" of {code(str(source))}" if source else ""
    served = f", model {code(str(model))}" if model else ""
    return (
        f"kvaudit {__version__}: {counted(audit.requests, 'request')}{trace}{served}; {finished} of "
        f"{counted(len(audit.arms), 'arm')} finished."
    )


def _finding(audit: Audit, finding: Finding) -> str:
    details = (f"  - {prose(sentence)}" for sentence in details_beside_line(finding))
    return "\n".join([f"- {prose(finding_line(finding, audit.figures))}", *details])
