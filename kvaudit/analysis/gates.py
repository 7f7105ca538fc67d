"""Limits that users set, and what the figures make of each: pass, fail or inconclusive.

An absolute limit fails when the observed value breaks it and passes when its 95 % bound keeps it. A relative one, held
against another policy or a baseline, is judged by the bounds of the paired interval alone: it passes when all of the
interval keeps the limit, fails when none of it does. Everything in between is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kvaudit.analysis import stats
from kvaudit.analysis.baseline import Baseline
from kvaudit.analysis.figures import Figure, select
from kvaudit.analysis.findings import Finding
from kvaudit.errors import UsageError

Outcome = Literal["pass", "fail", "inconclusive", "no gates"]
Gate = Literal["min-fidelity", "max-variation", "non-inferior", "max-fidelity-drop", "max-variation-rise"]
Why = Literal["broken", "kept", "no-power", "noise-possible", "finding-inconclusive", "not-compared"]


@dataclass(frozen=True, slots=True)
class NonInferiority:
    """`policy` may be at most `margin` (a share) below `than` in fidelity, in every order."""

    policy: str
    than: str
    margin: float


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits that a user sets, as shares from 0 to 1. `policies` limits all but `non_inferior` to some policies;
    `source` is the file that they came from. Raises UsageError for a limit that is no share."""

    min_fidelity: float | None = None
    max_variation: float | None = None
    policies: tuple[str, ...] | None = None
    non_inferior: tuple[NonInferiority, ...] = ()
    max_fidelity_drop: float | None = None
    max_variation_rise: float | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        limits = {
            "min-fidelity": self.min_fidelity,
            "max-variation": self.max_variation,
            "max-fidelity-drop": self.max_fidelity_drop,
            "max-variation-rise": self.max_variation_rise,
        }
        for gate in self.non_inferior:
            limits[f"the margin of non-inferior {gate.policy!r}"] = gate.margin
            if gate.policy == gate.than:
                raise UsageError(f"non-inferior holds {gate.policy!r} against itself", "name two policies")
        for name, limit in limits.items():
            if limit is not None and not 0 <= limit <= 1:
                raise UsageError(f"{name} is {limit}, not a share from 0 to 1", "write 0.95 for 95 %")

    @property
    def per_policy(self) -> bool:
        """Whether there is a limit that `policies` may restrict."""
        return self.min_fidelity is not None or self.max_variation is not None or self.relative

    @property
    def relative(self) -> bool:
        """Whether there is a limit against a baseline."""
        return self.max_fidelity_drop is not None or self.max_variation_rise is not None

    @property
    def any(self) -> bool:
        return self.per_policy or bool(self.non_inferior)

    @property
    def named_policies(self) -> tuple[str, ...]:
        pairs = [name for gate in self.non_inferior for name in (gate.policy, gate.than)]
        return tuple(dict.fromkeys((*(self.policies or ()), *pairs)))


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate on one policy.

    value: what was observed; of a relative gate a difference, this policy or run minus the other.
    bound: the 95 % bound that would have to keep the limit.
    order: the order with the worst value, where the gate looks at every order.
    needed: the number of requests at which the bound would keep the limit if the observed value held (None: at none).
    block: how many of the n requests count as one because their windows overlap.
    than: the policy that a non-inferiority gate holds this one against.
    """

    gate: Gate
    policy: str
    limit: float
    outcome: Outcome
    why: Why
    value: float | None = None
    bound: float | None = None
    order: str | None = None
    n: int | None = None
    needed: int | None = None
    block: int = 1
    than: str | None = None


class Difference(NamedTuple):
    """A paired difference in one order, with its interval."""

    order: str | None
    value: float
    low: float
    high: float
    n: int


def gate_results(
    findings: Sequence[Finding], figures: Sequence[Figure], gates: Gates, baseline: Baseline | None
) -> tuple[GateResult, ...]:
    """Every gate on every policy that it holds."""
    results: list[GateResult] = []
    for finding in findings:
        if gates.policies is not None and finding.policy not in gates.policies:
            continue
        if gates.min_fidelity is not None:
            results.append(_fidelity_gate(finding, figures, gates.min_fidelity))
        if gates.max_variation is not None:
            results.append(_variation_gate(finding, figures, gates.max_variation))
        if baseline is not None:
            results += _baseline_gates(finding, gates, baseline)
    return (*results, *_non_inferiority_gates(findings, figures, gates.non_inferior))


def _fidelity_gate(finding: Finding, figures: Sequence[Figure], limit: float) -> GateResult:
    """The order with the lowest fidelity must keep the limit; every order's lower bound must too, to pass."""
    measured = [
        (figure.value, figure.low or 0.0, figure)
        for figure in select(figures, "fidelity", finding.policy, control="none")
        if figure.value is not None
    ]
    if not measured:
        return GateResult("min-fidelity", finding.policy, limit, "inconclusive", "finding-inconclusive")
    value, _, worst = min(measured, key=lambda row: row[0])
    bound = min(low for _, low, _ in measured)
    outcome, why = _judged((finding,), broken=value < limit, kept=bound >= limit)
    needed = stats.requests_for_fidelity(value, limit, finding.overlap) if why == "no-power" else None
    return GateResult(
        "min-fidelity", finding.policy, limit, outcome, why, value, bound, worst.order, worst.n, needed, finding.block
    )


def _variation_gate(finding: Finding, figures: Sequence[Figure], limit: float) -> GateResult:
    figure = next(iter(select(figures, "answer_variation", finding.policy)), None)
    if figure is None or figure.value is None or figure.n is None:
        return GateResult("max-variation", finding.policy, limit, "inconclusive", "finding-inconclusive")
    high = 1.0 if figure.high is None else figure.high
    broken, kept = figure.value > limit, high <= limit
    outcome, why = _judged((finding,), broken=broken, kept=kept)
    if why == "broken" and not finding.noise_excluded:
        outcome, why = "inconclusive", "noise-possible"
    needed = None
    if why == "no-power":
        estimate = stats.Estimate(figure.value, figure.low, figure.high, figure.n, figure.test or "")
        needed = stats.requests_for_variation(estimate, limit, finding.overlap)
    n, block = figure.n, finding.block
    return GateResult("max-variation", finding.policy, limit, outcome, why, figure.value, high, None, n, needed, block)


def _non_inferiority_gates(
    findings: Sequence[Finding], figures: Sequence[Figure], gates: Iterable[NonInferiority]
) -> Iterator[GateResult]:
    found = {finding.policy: finding for finding in findings}
    for gate in gates:
        pair = found[gate.policy], found[gate.than]
        block = pair[0].block
        forward = select(figures, "fidelity_difference", f"{gate.policy} - {gate.than}", control="none")
        backward = select(figures, "fidelity_difference", f"{gate.than} - {gate.policy}", control="none")
        differences = _differences([*forward, *(_turned(figure) for figure in backward)])
        result = replace(_unjudged("non-inferior", pair[0], gate.margin, block), than=gate.than)
        yield _held(result, differences, pair)


def _baseline_gates(finding: Finding, gates: Gates, baseline: Baseline) -> Iterator[GateResult]:
    pair = (finding, *(before for before in baseline.findings if before.policy == finding.policy))
    mine = [change.figure for change in baseline.changes if change.figure.policy == finding.policy]
    if gates.max_fidelity_drop is not None:
        drops = _differences(select(mine, "fidelity_change", control="none"))
        yield _held(_unjudged("max-fidelity-drop", finding, gates.max_fidelity_drop, baseline.block), drops, pair)
    if gates.max_variation_rise is not None:
        rises = [_turned(figure) for figure in select(mine, "variation_change")]
        unjudged = _unjudged("max-variation-rise", finding, gates.max_variation_rise, baseline.block)
        gate = _held(unjudged, _differences(rises), pair)
        yield replace(gate, value=_negated(gate.value), bound=_negated(gate.bound))


def _unjudged(gate: Gate, finding: Finding, limit: float, block: int) -> GateResult:
    return GateResult(gate, finding.policy, limit, "inconclusive", "not-compared", block=block)


def _held(gate: GateResult, differences: Sequence[Difference], findings: Sequence[Finding]) -> GateResult:
    """A relative gate, given every order's difference; a negative one is a loss."""
    if not differences:
        return gate
    worst = min(differences, key=lambda difference: difference.value)
    bound = min(difference.low for difference in differences)
    broken = any(difference.high < -gate.limit for difference in differences)
    outcome, why = _judged(findings, broken=broken, kept=bound >= -gate.limit)
    needed = None
    if why == "no-power" and worst.value > -gate.limit:
        needed = math.ceil(worst.n * ((worst.value - bound) / (worst.value + gate.limit)) ** 2)
    return replace(
        gate,
        outcome=outcome,
        why=why,
        value=worst.value,
        bound=bound,
        order=worst.order,
        n=worst.n,
        needed=needed,
    )


def _differences(figures: Iterable[Figure]) -> list[Difference]:
    return [
        Difference(figure.order, figure.value, figure.low, figure.high, figure.n)
        for figure in figures
        if figure.value is not None and figure.low is not None and figure.high is not None and figure.n
    ]


def _turned(figure: Figure) -> Figure:
    """The difference of the same two policies the other way round."""
    first, second = figure.discordant or (0, 0)
    turned = None if figure.discordant is None else (second, first)
    value, low, high = _negated(figure.value), _negated(figure.high), _negated(figure.low)
    return replace(figure, value=value, low=low, high=high, discordant=turned)


def _negated(value: float | None) -> float | None:
    return None if value is None else -value


def _judged(findings: Sequence[Finding], *, broken: bool, kept: bool) -> tuple[Outcome, Why]:
    if broken and all(finding.stands for finding in findings):
        return "fail", "broken"
    if any(finding.reasons for finding in findings):
        return "inconclusive", "finding-inconclusive"
    return ("pass", "kept") if kept else ("inconclusive", "no-power")
