"""Limits that users set, and what the figures make of each: pass, fail or inconclusive.

An absolute limit fails when the observed value breaks it and passes when its 95 % bound keeps it. A relative one, held
against another policy or a baseline, is judged by the bounds of the paired interval alone: it passes when all of the
interval keeps the limit, fails when none of it does. Everything in between is inconclusive, and so is an answer
variation above its limit where run-to-run noise is not ruled out. Requests whose windows overlap count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from kvaudit.analysis import stats
from kvaudit.analysis.baseline import Baseline
from kvaudit.analysis.checks import OF_REFERENCE, OF_ROUNDING, OF_VARIATION, ReasonCode
from kvaudit.analysis.figures import Figure, select
from kvaudit.analysis.findings import Finding
from kvaudit.errors import UsageError

Outcome = Literal["pass", "fail", "inconclusive", "no gates"]
Gate = Literal["min-fidelity", "max-variation", "non-inferior", "max-fidelity-drop", "max-variation-rise"]
MOST_REQUESTS = 1_000_000_000
Why = Literal[
    "broken",
    "kept",
    "no-power",
    "noise-possible",
    "rounding-possible",
    "finding-inconclusive",
    "reference-doubtful",
    "not-compared",
    "orders-unpaired",
]


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
    overlap: how many successive requests share content; a bound of a gate counts them as one.
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
    overlap: int = 1
    than: str | None = None


class Paired(NamedTuple):
    """What one order lost and gained on n requests against the other policy or run, each a sum over requests."""

    order: str | None
    gained: float
    lost: float
    n: int

    @property
    def value(self) -> float:
        return (self.gained - self.lost) / self.n

    def interval(self, overlap: int, alpha: float = stats.ALPHA, requests: int | None = None) -> tuple[float, float]:
        """Of the difference; as it would be over another number of requests of which as many had gained and lost."""
        n = requests or self.n
        scale = n / self.n
        estimate = stats.paired_difference(self.gained * scale, self.lost * scale, n, overlap, alpha)
        if estimate is None or estimate.low is None or estimate.high is None:
            return -1.0, 1.0
        return estimate.low, estimate.high


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
    """The order with the lowest fidelity must keep the limit; every order's lower bound must too, to pass.

    An order under the rounding control counts as one: another device may round like that. An order that rounding
    touched breaks the limit only where its rounding control does too.
    """
    overlap = finding.overlap
    measured = [
        (figure.value, figure.n, figure.order or "", control)
        for control in ("none", "rounding")
        for figure in select(figures, "fidelity", finding.policy, control=control)
        if figure.value is not None and figure.n
    ]
    if not measured:
        return _unjudged("min-fidelity", finding, limit, overlap)

    def lowest(scale: float = 1.0) -> float:
        bounds = (stats.wilson(value * n * scale, round(n * scale), overlap) for value, n, *_ in measured)
        return min(bound.low or 0.0 for bound in bounds if bound is not None)

    below = {(order, control) for value, _, order, control in measured if value < limit}
    broken = any(
        control == "none" and (order not in finding.touched or (order, "rounding") in below) for order, control in below
    )
    value, n, order, control = min(measured)
    outcome, why = _judged((finding,), broken=broken, kept=lowest() >= limit, seen_to=OF_ROUNDING | OF_VARIATION)
    if below and not broken and why not in ("finding-inconclusive", "reference-doubtful"):
        outcome, why = "inconclusive", "rounding-possible"
    needed = _needed(n, lambda requests: lowest(requests / n) >= limit) if why == "no-power" else None
    where = order if control == "none" else f"{order} ({control})"
    return GateResult(
        "min-fidelity", finding.policy, limit, outcome, why, value, lowest(), where, n, needed, overlap=overlap
    )


def _variation_gate(finding: Finding, figures: Sequence[Figure], limit: float) -> GateResult:
    """What rounding may explain breaks no limit, and a limit that the rounding control does not keep is not kept."""
    overlap = finding.overlap
    figure = next(iter(select(figures, "answer_variation", finding.policy)), None)
    if figure is None or figure.value is None or figure.n is None or figure.high is None:
        return _unjudged("max-variation", finding, limit, overlap)
    value, n = figure.value, figure.n
    high = figure.high if overlap == 1 else max(figure.high, stats.upper_bound_of_mean(value, n, overlap))
    controls = select(figures, "rounding_disagreement", finding.policy)
    rounded = max((control.value for control in controls if control.value is not None), default=0.0)
    broken = value > limit and (not finding.touched or finding.proven_variation > limit)
    outcome, why = _judged((finding,), broken=broken, kept=max(high, rounded) <= limit, seen_to=OF_REFERENCE)
    if why == "broken" and not finding.noise_excluded:
        outcome, why = "inconclusive", "noise-possible"
    if why == "no-power" and (value > limit or rounded > limit):
        why = "rounding-possible"
    needed = None
    if why == "no-power":
        needed = _needed(n, lambda requests: stats.upper_bound_of_mean(value, requests, overlap) <= limit)
    return GateResult(
        "max-variation", finding.policy, limit, outcome, why, value, high, None, n, needed, overlap=overlap
    )


def _non_inferiority_gates(
    findings: Sequence[Finding], figures: Sequence[Figure], gates: Iterable[NonInferiority]
) -> Iterator[GateResult]:
    found = {finding.policy: finding for finding in findings}
    for gate in gates:
        finding, other = found[gate.policy], found[gate.than]
        forward = select(figures, "fidelity_difference", f"{gate.policy} - {gate.than}", control="none")
        backward = select(figures, "fidelity_difference", f"{gate.than} - {gate.policy}", control="none")
        pairs = [
            Paired(figure.order, *(figure.discordant if figure in forward else figure.discordant[::-1]), figure.n)
            for figure in (*forward, *backward)
            if figure.discordant is not None and figure.n
        ]
        unjudged = replace(_unjudged("non-inferior", finding, gate.margin, finding.overlap), than=gate.than)
        yield _held(unjudged, pairs, (finding, other))


def _baseline_gates(finding: Finding, gates: Gates, baseline: Baseline) -> Iterator[GateResult]:
    both = (finding, *(before for before in baseline.findings if before.policy == finding.policy))
    mine = [change for change in baseline.changes if change.figure.policy == finding.policy and change.figure.n]
    if gates.max_fidelity_drop is not None:
        drops = [
            Paired(change.figure.order, change.gained, change.lost, change.figure.n or 0)
            for change in mine
            if change.figure.metric == "fidelity_change" and change.figure.control == "none"
        ]
        unjudged = _unjudged("max-fidelity-drop", finding, gates.max_fidelity_drop, baseline.overlap)
        yield _where_paired(_held(unjudged, drops, both), baseline)
    if gates.max_variation_rise is not None:
        rises = [
            Paired(None, change.lost, change.gained, change.figure.n or 0)
            for change in mine
            if change.figure.metric == "variation_change"
        ]
        gate = _held(_unjudged("max-variation-rise", finding, gates.max_variation_rise, baseline.overlap), rises, both)
        value, bound = (None if number is None else -number for number in (gate.value, gate.bound))
        yield _where_paired(replace(gate, value=value, bound=bound), baseline)


def _where_paired(gate: GateResult, baseline: Baseline) -> GateResult:
    """A gate cannot pass while the policy has orders that the baseline did not replay alike."""
    if gate.outcome == "pass" and any(policy == gate.policy for policy, _ in baseline.unpaired):
        return replace(gate, outcome="inconclusive", why="orders-unpaired")
    return gate


def _unjudged(gate: Gate, finding: Finding, limit: float, overlap: int) -> GateResult:
    return GateResult(gate, finding.policy, limit, "inconclusive", "not-compared", overlap=overlap)


def _held(gate: GateResult, pairs: Sequence[Paired], findings: Sequence[Finding]) -> GateResult:
    """A relative gate, given what every order lost and gained.

    It passes when every order's interval keeps the limit, and fails when any order's is beyond it at the level that
    Bonferroni's correction for so many orders asks for: looking at five must not make it fail five times as often. An
    order that rounding touched in one of the runs cannot make it fail.
    """
    if not pairs:
        return gate
    overlap, limit = gate.overlap, -gate.limit
    beyond = [pair for pair in pairs if pair.interval(overlap, stats.ALPHA / len(pairs))[1] < limit]
    worst = min(beyond or pairs, key=lambda pair: pair.interval(overlap)[0])
    bound = worst.interval(overlap)[0]
    touched = {order for finding in findings for order in finding.touched}
    broken = any(pair.order not in touched if pair.order else not touched for pair in beyond)
    seen_to = OF_REFERENCE if gate.gate == "max-variation-rise" else OF_VARIATION
    outcome, why = _judged(findings, broken=broken, kept=bound >= limit, seen_to=seen_to)
    if why == "no-power" and beyond:
        why = "rounding-possible"
    needed = None
    if why == "no-power":
        needed = _needed(worst.n, lambda requests: worst.interval(overlap, requests=requests)[0] >= limit)
    return replace(
        gate, outcome=outcome, why=why, value=worst.value, bound=bound, order=worst.order, n=worst.n, needed=needed
    )


def _needed(n: int, enough: Callable[[int], bool]) -> int | None:
    """About how many requests are enough, where n are not; None where MOST_REQUESTS are not either."""
    low, high = n, 2 * n
    while not enough(high):
        if high > MOST_REQUESTS:
            return None
        low, high = high, 2 * high
    while high - low > max(1, high // 1_000):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _judged(
    findings: Sequence[Finding], *, broken: bool, kept: bool, seen_to: Collection[ReasonCode] = ()
) -> tuple[Outcome, Why]:
    """`seen_to`: reasons that `broken` allows for."""
    if broken and all(finding.stands_but_for(seen_to) for finding in findings):
        return "fail", "broken"
    doubts = {reason.code for finding in findings for reason in finding.reasons}
    if doubts:
        return "inconclusive", "finding-inconclusive" if doubts - OF_REFERENCE else "reference-doubtful"
    return ("pass", "kept") if kept else ("inconclusive", "no-power")
