"""What the checks must find on the embedded engine, from its switches alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvaudit.doctor.checks import CHECKS, Finding
from kvaudit.doctor.checks.findings import Inconclusive
from kvaudit.doctor.checks.lab import Lab
from kvaudit.doctor.checks.measuring import ROUNDING
from kvaudit.engines import PREFIX_LOOKUPS, Probed, Switches

INCONCLUSIVE: dict[str, str | None] = dict.fromkeys(name for name in CHECKS if name != "save loss")
"""By check, the switch that a finding names; None where the check cannot see."""

EVERY = [
    Switches(mask, gap, lookup, write_back, suffix, keys=keys)
    for mask, gap, lookup, write_back, suffix, keys in itertools.product(
        ("exact", "bottom-right"),
        ("recompute", "zero", "store"),
        ("any", "stop-at-miss"),
        ("first-writer", "last-writer", "isolated", "versioned", "versions", "none"),
        ("after", "with-rows"),
        ("moved", "unmoved"),
    )
]


def reuses_behind_another(switches: Switches) -> bool:
    """Whether a chunk is reused that does not begin a prompt: `versioned` may end its lookup at a gap."""
    if switches.write_back == "versioned":
        return switches.gap == "store" or (switches.mask == "exact" and switches.gap == "recompute")
    return switches.write_back != "none"


def expected(switches: Switches) -> dict[str, str | None]:
    """`save loss` is left out: no switch of the embedded engine loses a chunk."""
    if switches.write_back == "none":
        return INCONCLUSIVE | {"discipline": "--write-back none"}
    if switches.lookup in PREFIX_LOOKUPS:
        return INCONCLUSIVE | {"discipline": "--write-back versioned"}
    if switches.write_back == "versioned":
        return INCONCLUSIVE | {"discipline": "--write-back versioned" if reuses_behind_another(switches) else None}
    computes_what_it_misses_alone = switches.write_back == "isolated"
    return {
        "causality": f"--mask {switches.mask}",
        "gap": f"--gap {switches.gap}",
        "lookup": "--lookup any" if computes_what_it_misses_alone else f"--lookup {switches.lookup}",
        "discipline": f"--write-back {switches.write_back}",
        "position": f"--keys {switches.keys}",
    }


def found(check: str, engine: Probed, noise: float = ROUNDING) -> Finding:
    """One check's finding, without the containment of `run_checks`."""
    try:
        return CHECKS[check](Lab(engine, check, noise))
    except Inconclusive as end:
        return Finding(check, "inconclusive", evidence=end.evidence, reason=end.reason)


def told(findings: Sequence[Finding]) -> dict[str, str | None]:
    return {finding.check: finding.switch for finding in findings if finding.check not in ("noise", "save loss")}


def finding_of(findings: Sequence[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)
