"""The verdict: what the gates make of the findings, decided here and nowhere else (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.analysis.baseline import Baseline
from kvaudit.analysis.figures import Figure
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.gates import GateResult, Gates, Outcome, gate_results
from kvaudit.errors import UsageError

EXIT_CODES: dict[Outcome, int] = {"pass": 0, "no gates": 0, "fail": 1, "inconclusive": 4}


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    gates: tuple[GateResult, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def decide(
    findings: Sequence[Finding], figures: Sequence[Figure], gates: Gates, baseline: Baseline | None = None
) -> Verdict:
    """What the gates make of the findings. A failed gate decides; then any doubt; nothing audited is a doubt.

    Raises UsageError for gates on a policy that was not audited, and for gates against a baseline without one.
    """
    known = [finding.policy for finding in findings]
    for name in gates.named_policies:
        if name not in known:
            raise UsageError(f"the run has no policy {name!r}", f"audited: {', '.join(known) or 'none'}")
    if gates.relative and baseline is None:
        raise UsageError("max-fidelity-drop and max-variation-rise need another run", "name it with --baseline RUN")
    results = gate_results(findings, figures, gates, baseline)
    outcomes = {result.outcome for result in results}
    gated = [finding for finding in findings if gates.policies is None or finding.policy in gates.policies]
    if "fail" in outcomes:
        return Verdict("fail", results)
    if not gated or "inconclusive" in outcomes or any(finding.seen == "inconclusive" for finding in gated):
        return Verdict("inconclusive", results)
    return Verdict("pass" if gates.any else "no gates", results)
