"""The audit as JUnit XML: a suite for the verdict, then one for every arm with a test case for every request.

The case of the verdict holds the findings; it passes when the exit code is 0, and is skipped when it is inconclusive.
Every arm is held against full prefill: a case passes only when its answer was compared and is equal; it fails when the
answer differs, is an error when the engine failed, and is skipped, with the reason, when nothing can be said of it.
Cases are written one after the other: only codes are held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOBase
from typing import TYPE_CHECKING, TextIO, cast
from xml.sax.saxutils import XMLGenerator
from xml.sax.xmlreader import AttributesImpl

import numpy as np
from numpy.typing import NDArray

from kvaudit.analysis.checks import OF_VARIATION
from kvaudit.analysis.compare import DIFFERENT, EQUAL, NO_ROW, Grid, Pair, agreement
from kvaudit.analysis.findings import Finding
from kvaudit.reports.escape import excerpt, first_difference, visible
from kvaudit.reports.words.findings import reason_sentence
from kvaudit.reports.words.gates import gate_line, gate_sentence
from kvaudit.reports.words.verdict import headline

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

PASSED, FAILED, ERROR, INCONCLUSIVE, UNFINISHED, MISSING, REFERENCE, NO_REFERENCE = range(8)
"""What becomes of a case; all from INCONCLUSIVE on are skipped."""
SKIPPED = {
    UNFINISHED: "The arm is not finished.",
    MISSING: "The request has no observation in this arm.",
    REFERENCE: "This is full prefill, which the other arms are held against.",
    NO_REFERENCE: "Full prefill has no answer to compare this one with.",
}
NO_ANSWER = "The engine gave no answer."
LONGEST_ERROR = 2_000

Codes = NDArray[np.int8]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Counts:
    """The attributes of a suite."""

    tests: int
    failures: int
    errors: int
    skipped: int
    seconds: float

    def attributes(self) -> dict[str, str]:
        return {
            "tests": str(self.tests),
            "failures": str(self.failures),
            "errors": str(self.errors),
            "skipped": str(self.skipped),
            "time": f"{self.seconds:.3f}",
        }


@dataclass(frozen=True, slots=True)
class Case:
    """A case of the verdict suite. `outcome` is PASSED, FAILED or INCONCLUSIVE."""

    name: str
    kind: str
    outcome: int
    sentence: str


def render(audit: Audit, out: TextIO) -> None:
    """Write the audit to `out` as one XML document, in UTF-8."""
    xml = XMLGenerator(cast(TextIOBase, out), "utf-8", short_empty_elements=True)
    verdict = list(_verdict_cases(audit))
    outcomes = [_outcomes(audit, arm) for arm in range(len(audit.arms))]
    counts = [_counted(codes, _seconds(audit.grid, arm)) for arm, codes in enumerate(outcomes)]
    xml.startDocument()
    _open(xml, "testsuites", {"name": "kvaudit", **_total([_verdict_counts(verdict), *counts]).attributes()})
    _write_verdict(xml, verdict)
    names = [visible(name) for name in audit.grid.request_ids.to_pylist()]
    for arm, (codes, count) in enumerate(zip(outcomes, counts, strict=True)):
        _write_arm(xml, audit, arm, codes, count, names)
    _close(xml, "testsuites")
    xml.endDocument()


def _verdict_cases(audit: Audit) -> Iterator[Case]:
    """The verdict with the findings behind it, then every gate."""
    yield Case("verdict", "verdict", _OUTCOMES[audit.verdict.outcome], "\n".join(headline(audit)))
    for gate in audit.verdict.gates:
        yield Case(gate_line(gate), "gate", _OUTCOMES[gate.outcome], gate_sentence(gate))


_OUTCOMES = {"pass": PASSED, "no gates": PASSED, "fail": FAILED, "inconclusive": INCONCLUSIVE}


def _verdict_counts(cases: Sequence[Case]) -> Counts:
    outcomes = [case.outcome for case in cases]
    return Counts(len(cases), outcomes.count(FAILED), 0, outcomes.count(INCONCLUSIVE), 0.0)


def _outcomes(audit: Audit, arm: int) -> Codes:
    """What becomes of each request's case in an arm: int8 [R]."""
    grid, reference = audit.grid, audit.grid.reference
    rows = grid.rows[arm]
    if not grid.arms[arm].finished:
        return np.full(len(rows), UNFINISHED, np.int8)
    if reference is None or arm == reference:
        codes = np.full(len(rows), NO_REFERENCE if reference is None else REFERENCE, np.int8)
    else:
        codes = _compared(agreement(grid, reference, arm), _finding(audit, arm))
    present = rows != NO_ROW
    codes[~present] = MISSING
    codes[present & grid.failed[rows]] = ERROR
    return codes


def _compared(agreeing: Codes, finding: Finding | None) -> Codes:
    """A difference stands where a gate could fail on it; equality needs a finding without any doubt."""
    equal = INCONCLUSIVE if finding is not None and finding.reasons else PASSED
    differs = FAILED if finding is None or finding.stands_but_for(OF_VARIATION) else INCONCLUSIVE
    return np.select([agreeing == EQUAL, agreeing == DIFFERENT], [equal, differs], NO_REFERENCE).astype(np.int8)


def _finding(audit: Audit, arm: int) -> Finding | None:
    policy = audit.grid.arms[arm].policy
    return next((finding for finding in audit.findings if finding.policy == policy), None)


def _counted(codes: Codes, seconds: Seconds) -> Counts:
    of = np.bincount(codes, minlength=NO_REFERENCE + 1)
    skipped = int(of[INCONCLUSIVE:].sum())
    return Counts(len(codes), int(of[FAILED]), int(of[ERROR]), skipped, float(np.nansum(seconds)))


def _total(counts: Sequence[Counts]) -> Counts:
    return Counts(
        sum(count.tests for count in counts),
        sum(count.failures for count in counts),
        sum(count.errors for count in counts),
        sum(count.skipped for count in counts),
        sum(count.seconds for count in counts),
    )


def _seconds(grid: Grid, arm: int) -> Seconds:
    """How long each request took: float64 [R], NaN where that is not known."""
    if not grid.arms[arm].finished:
        return np.full(len(grid.request_ids), np.nan)
    seconds: Seconds = grid.column("total_ms", arm) / 1000
    return np.where(np.isfinite(seconds), seconds, np.nan)


def _write_verdict(xml: XMLGenerator, cases: Sequence[Case]) -> None:
    _open(xml, "testsuite", {"name": "verdict", **_verdict_counts(cases).attributes()})
    for case in cases:
        _open(xml, "testcase", {"name": case.name, "classname": f"verdict.{case.kind}", "time": "0.000"})
        if case.outcome == FAILED:
            _element(xml, "failure", {"message": case.sentence, "type": case.kind}, "")
        elif case.outcome == INCONCLUSIVE:
            _element(xml, "skipped", {"message": case.sentence}, "")
        else:
            _element(xml, "system-out", {}, case.sentence)
        _close(xml, "testcase")
    _close(xml, "testsuite")


def _write_arm(xml: XMLGenerator, audit: Audit, arm: int, codes: Codes, count: Counts, names: Sequence[str]) -> None:
    planned = audit.grid.arms[arm]
    control = () if planned.control == "none" else (planned.control,)
    classname = visible(".".join((planned.policy, planned.order, *control)))
    bodies = _Bodies(audit, arm)
    _open(xml, "testsuite", {"name": visible(planned.arm_id), **count.attributes()})
    seconds = _seconds(audit.grid, arm).tolist()
    for request, (code, name, took) in enumerate(zip(codes.tolist(), names, seconds, strict=True)):
        attributes = {"name": name, "classname": classname}
        if took == took:
            attributes["time"] = f"{took:.3f}"
        xml.startElement("testcase", AttributesImpl(attributes))
        if code != PASSED:
            bodies.write(xml, request, code)
        xml.endElement("testcase")
        xml.ignorableWhitespace("\n")
    _close(xml, "testsuite")


class _Bodies:
    """What stands in the cases of one arm that did not pass."""

    def __init__(self, audit: Audit, arm: int) -> None:
        self._grid, self._arm = audit.grid, arm
        self._pair = _pair(audit, arm)
        self._tokens = audit.grid.column("first_difference", arm)
        finding = _finding(audit, arm)
        doubt = reason_sentence(finding.reasons[0]) if finding is not None and finding.reasons else ""
        self._skipped = {**SKIPPED, INCONCLUSIVE: doubt}

    def write(self, xml: XMLGenerator, request: int, code: int) -> None:
        if code == FAILED:
            message, body = self._difference(request)
            _element(xml, "failure", {"message": message, "type": "difference"}, body)
        elif code == ERROR:
            error = self._grid.error(self._arm, request)
            text = NO_ANSWER if error is None else excerpt(error, length=LONGEST_ERROR)
            _element(xml, "error", {"message": text, "type": "engine"}, "")
        else:
            _element(xml, "skipped", {"message": self._skipped[code]}, "")

    def _difference(self, request: int) -> tuple[str, str]:
        """Where two answers part and how far apart they are; what stands there in both."""
        grid, reference = self._grid, self._grid.reference
        left = None if reference is None else grid.text(reference, request)
        right = grid.text(self._arm, request)
        facts, split = ["The answer differs from full prefill's"], 0
        if self._tokens[request] >= 0:
            facts.append(f"first difference at token {self._tokens[request]:.0f}")
        if left is not None and right is not None and left != right:
            split = first_difference(left, right)
            facts.append(f"first difference at character {split:,}")
        distance = -1 if self._pair is None else int(self._pair.distance[request])
        if distance >= 0:
            facts.append(f"edit distance {distance:,}")
        shown = ["(no text)" if text is None else excerpt(text, split) for text in (left, right)]
        return f"{', '.join(facts)}.", f"full prefill: {shown[0]}\nthis arm: {shown[1]}"


def _pair(audit: Audit, arm: int) -> Pair | None:
    """The comparison of an arm with full prefill, where the audit made one."""
    reference = audit.grid.reference
    return next((pair for pair in audit.pairs if (pair.left, pair.right) == (reference, arm)), None)


def _element(xml: XMLGenerator, name: str, attributes: dict[str, str], text: str) -> None:
    xml.startElement(name, AttributesImpl(attributes))
    if text:
        xml.characters(text)
    xml.endElement(name)


def _open(xml: XMLGenerator, name: str, attributes: dict[str, str]) -> None:
    xml.startElement(name, AttributesImpl(attributes))
    xml.ignorableWhitespace("\n")


def _close(xml: XMLGenerator, name: str) -> None:
    xml.endElement(name)
    xml.ignorableWhitespace("\n")
