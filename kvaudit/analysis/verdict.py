"""The finding per policy and the verdict: decided here and nowhere else, as codes and numbers (DESIGN 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvaudit.analysis import stats
from kvaudit.analysis.checks import STANDING, Reason, disagreement, policy_reasons, reference_reasons
from kvaudit.analysis.compare import Grid, Pair
from kvaudit.analysis.figures import Figure, chance_of_reproducing, select, variation_by_request
from kvaudit.errors import UsageError

Seen = Literal["history-sensitive", "none-seen", "inconclusive"]
Outcome = Literal["pass", "fail", "inconclusive", "no gates"]
Gate = Literal["min-fidelity", "max-variation"]
Why = Literal["broken", "kept", "no-power", "finding-inconclusive"]

EXIT_CODES: dict[Outcome, int] = {"pass": 0, "no gates": 0, "fail": 1, "inconclusive": 4}
EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits that a user sets, as shares from 0 to 1; `policies` limits them to some policies."""

    min_fidelity: float | None = None
    max_variation: float | None = None
    policies: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, limit in (("--min-fidelity", self.min_fidelity), ("--max-variation", self.max_variation)):
            if limit is not None and not 0 <= limit <= 1:
                raise UsageError(f"{name} is {limit}, not a share from 0 to 1", "write 0.95 for 95 %")

    @property
    def any(self) -> bool:
        return self.min_fidelity is not None or self.max_variation is not None


@dataclass(frozen=True, slots=True)
class Finding:
    """What the audit saw of one policy.

    compared: requests that were compared between orders; flipped: how many of them any two orders answered
    differently, with the first few as examples.
    own_losses: of reset_compared requests, how many the policy answers otherwise than full prefill even without
    history (reset control).
    repeat_losses: of repeat_compared requests, how many the repeat control answers differently.
    overlap: how many successive requests of the stream share content; block: how many of them count as one here.
    smallest_visible: the smallest share of affected requests that would have shown with 95 % probability.
    chance_of_reproducing: p-value of 'the repeat agreed by luck, answers vary from run to run'; None where it did not
    agree.
    """

    policy: str
    seen: Seen
    reasons: tuple[Reason, ...]
    compared: int
    flipped: int
    examples: tuple[str, ...]
    reset_compared: int
    own_losses: int
    repeat_compared: int
    repeat_losses: int
    overlap: int
    block: int
    smallest_visible: float | None
    chance_of_reproducing: float | None


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate on one policy. `bound` is the 95 % bound that would have to keep the limit, `needed` the number of
    requests at which it would if the observed value held (None: at no number), `block` how many of the n requests count
    as one because their windows overlap."""

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


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    gates: tuple[GateResult, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def find(grid: Grid, pairs: Sequence[Pair], max_noise: float, overlap: int = 1) -> tuple[Finding, ...]:
    """The finding of every policy.

    `max_noise`: the share of answers that a second run of the same order may give differently. `overlap`: how many
    successive requests share content (`figures.stream_overlap`).
    """
    shared = reference_reasons(grid, pairs, max_noise)
    return tuple(_finding(grid, pairs, policy, shared, max_noise, overlap) for policy in grid.policies)


def decide(findings: Sequence[Finding], figures: Sequence[Figure], gates: Gates) -> Verdict:
    """What the gates make of the findings. A failed gate decides; then any doubt; nothing audited is a doubt."""
    unknown = set(gates.policies or ()) - {finding.policy for finding in findings}
    if unknown:
        known = ", ".join(finding.policy for finding in findings) or "none"
        raise UsageError(f"the run has no policy {sorted(unknown)[0]!r}", f"audited: {known}")
    gated = [finding for finding in findings if gates.policies is None or finding.policy in gates.policies]
    results = tuple(result for finding in gated for result in _gated(finding, figures, gates))
    outcomes = {result.outcome for result in results}
    if "fail" in outcomes:
        return Verdict("fail", results)
    if not gated or "inconclusive" in outcomes or any(finding.seen == "inconclusive" for finding in gated):
        return Verdict("inconclusive", results)
    return Verdict("pass" if gates.any else "no gates", results)


def _finding(
    grid: Grid, pairs: Sequence[Pair], policy: str, shared: Sequence[Reason], max_noise: float, overlap: int
) -> Finding:
    block = stats.block_length(overlap, len(grid.request_ids))
    reasons = (*shared, *policy_reasons(grid, pairs, policy, max_noise, block))
    variation = variation_by_request(grid, pairs, policy)
    flipped = np.flatnonzero(variation > 0)
    compared = int((~np.isnan(variation)).sum())
    resets = [pair for pair in pairs if pair.kind == "reference" and pair.right in grid.find(policy, "reset")]
    repeat_losses, repeat_compared = disagreement(pairs, "repeat", policy)
    seen: Seen = "inconclusive" if reasons else "history-sensitive" if len(flipped) else "none-seen"
    return Finding(
        policy=policy,
        seen=seen,
        reasons=reasons,
        compared=compared,
        flipped=len(flipped),
        examples=tuple(grid.request_ids[int(index)].as_py() for index in flipped[:EXAMPLES]),
        reset_compared=sum(int(pair.comparable.sum()) for pair in resets),
        own_losses=sum(int(pair.differs.sum()) for pair in resets),
        repeat_compared=repeat_compared,
        repeat_losses=repeat_losses,
        overlap=overlap,
        block=block,
        smallest_visible=stats.smallest_visible(stats.independent(compared, block)),
        chance_of_reproducing=chance_of_reproducing(grid, policy) if len(flipped) and not repeat_losses else None,
    )


def _gated(finding: Finding, figures: Sequence[Figure], gates: Gates) -> list[GateResult]:
    results = []
    if gates.min_fidelity is not None:
        results.append(_fidelity_gate(finding, figures, gates.min_fidelity))
    if gates.max_variation is not None:
        results.append(_variation_gate(finding, figures, gates.max_variation))
    return results


def _fidelity_gate(finding: Finding, figures: Sequence[Figure], limit: float) -> GateResult:
    """The order with the lowest fidelity must keep the limit; its lower bound must too, to pass.

    The bound is Wilson's over independent blocks of requests: more careful than the interval beside the figure.
    """
    measured = [
        (figure.value, figure.n, figure)
        for figure in select(figures, "fidelity", finding.policy, control="none")
        if figure.value is not None and figure.n
    ]
    if not measured:
        return GateResult("min-fidelity", finding.policy, limit, "inconclusive", "finding-inconclusive")
    value, _, worst = min(measured, key=lambda row: row[0])
    estimates = [stats.wilson(round(share * n), n, finding.block) for share, n, _ in measured]
    bound = min(estimate.low or 0.0 for estimate in estimates if estimate is not None)
    outcome, why = _judged(finding, broken=value < limit, kept=bound >= limit)
    needed = stats.requests_for_fidelity(value, limit, finding.overlap) if why == "no-power" else None
    return GateResult(
        "min-fidelity", finding.policy, limit, outcome, why, value, bound, worst.order, worst.n, needed, finding.block
    )


def _variation_gate(finding: Finding, figures: Sequence[Figure], limit: float) -> GateResult:
    figure = next(iter(select(figures, "answer_variation", finding.policy)), None)
    if figure is None or figure.value is None or figure.n is None:
        return GateResult("max-variation", finding.policy, limit, "inconclusive", "finding-inconclusive")
    # A bootstrap over few blocks can end below what no variation at all would allow: no damage is ever rewarded.
    unseen = stats.upper_bound_of_none(stats.independent(figure.n, finding.block))
    high = max(figure.high or 0.0, unseen)
    kept = figure.high is not None and high <= limit
    outcome, why = _judged(finding, broken=figure.value > limit, kept=kept)
    needed = None
    if why == "no-power":
        estimate = stats.Estimate(figure.value, figure.low, figure.high, figure.n, figure.test or "")
        needed = stats.requests_for_variation(estimate, limit, finding.overlap)
    n, block = figure.n, finding.block
    return GateResult("max-variation", finding.policy, limit, outcome, why, figure.value, high, None, n, needed, block)


def _judged(finding: Finding, *, broken: bool, kept: bool) -> tuple[Outcome, Why]:
    if broken and all(reason.code in STANDING for reason in finding.reasons):
        return "fail", "broken"
    if finding.reasons:
        return "inconclusive", "finding-inconclusive"
    return ("pass", "kept") if kept else ("inconclusive", "no-power")
