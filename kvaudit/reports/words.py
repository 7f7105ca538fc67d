"""Codes and numbers as sentences, the same in every format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kvaudit.analysis.checks import Reason, ReasonCode
from kvaudit.analysis.figures import POINTS, Figure, requests_metric, select
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.gates import Gate, GateResult
from kvaudit.analysis.verdict import Verdict
from kvaudit.reports.escape import visible

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit
    from kvaudit.analysis.baseline import Baseline, Change, Flips
    from kvaudit.analysis.examples import Answer, Example

MOST_NAMES = 3
MOST_FLIPS = 20
OWN_ERROR = "own error of the policy and the engine's switches"
SEEN: Mapping[str, str] = MappingProxyType(
    {"history-sensitive": "history-sensitive", "none-seen": "none seen", "inconclusive": "inconclusive"}
)


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent; what is not quite nothing or everything never reads as if it were."""
    if share is None:
        return "-"
    shown, step = f"{100 * share:.{digits}f}", 10**-digits
    if 0 < share < 1 and float(shown) in (0, 100):
        return f"<{step:.{digits}f} %" if float(shown) == 0 else f">{100 - step:.{digits}f} %"
    return f"{shown} %"


def interval(figure: Figure, digits: int = 1) -> str:
    """A share's 95 % interval in percent."""
    if figure.low is None or figure.high is None:
        return "-"
    return f"{100 * figure.low:.{digits}f} to {100 * figure.high:.{digits}f}"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def small(value: float | None) -> str:
    """A number of any size in four characters or so of significance."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return "<0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def names(items: Sequence[str], most: int = MOST_NAMES) -> str:
    """The first few names, made harmless, and how many more there are."""
    shown = ", ".join(visible(item) for item in items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def counted(count: int | None, noun: str) -> str:
    return f"{count or 0:,} {noun}" + ("" if count == 1 else "s")


def reason_sentence(reason: Reason) -> str:
    return _REASONS[reason.code](reason)


_REASONS: Mapping[ReasonCode, Callable[[Reason], str]] = MappingProxyType(
    {
        "reference-missing": lambda r: "The run has no full-prefill arm: there is nothing to compare with.",
        "noise-floor-missing": lambda r: "Full prefill was not run a second time: the noise floor is unknown.",
        "control-missing": lambda r: f"The run has no {' and no '.join(r.names)} control for this policy.",
        "too-few-orders": lambda r: f"Only {counted(r.count, 'order')} was replayed: two are needed to see history.",
        "arms-unfinished": lambda r: f"{_of(r)} arms are not finished: {names(r.names)}.",
        "unplanned-rows": lambda r: (
            f"{counted(r.count, 'observation')} belong to an arm or a request that the run did not plan."
        ),
        "requests-missing": lambda r: f"{counted(r.count, 'request')} have no observation in {names(r.names)}.",
        "duplicates": lambda r: f"{counted(r.count, 'observation')} came twice in {names(r.names)}.",
        "errors": lambda r: f"{_of(r)} requests ended in an error or without an answer in {names(r.names)}.",
        "answers-empty": lambda r: (
            f"{_of(r)} full-prefill answers are empty: that empty answers are equal shows nothing."
        ),
        "nothing-compared": lambda r: f"Nothing was compared: {', '.join(_COMPARISONS[name] for name in r.names)}.",
        "reference-reused": lambda r: (
            f"{counted(r.count, 'full-prefill answer')} reused cached tokens: they are no full prefill."
        ),
        "noise-floor": lambda r: (
            f"Full prefill disagreed with itself on {_of(r)} requests; the limit is {percent(r.limit)}."
        ),
        "repeat-differs": lambda r: (
            f"The repeat control answered {_of(r)} requests differently; the limit is {percent(r.limit)}."
        ),
        "within-noise": lambda r: (
            f"{_of(r)} requests changed with the order, but answers vary from run to run too: that alone could explain "
            f"{percent(r.limit)}."
        ),
        "nothing-reused": lambda r: "Nothing was reused in any order: there was no history to be sensitive to.",
        "reuse-unknown": lambda r: "The engine did not say whether any cached token was reused.",
        "cache-not-empty": lambda r: (
            f"The cache was not empty at {counted(r.count, 'start')} from an empty cache: {names(r.names)}."
        ),
        "cache-unverified": lambda r: (
            f"It could not be verified that the cache was empty at {counted(r.count, 'start')}: {names(r.names)}."
        ),
        "budget-missed": lambda r: (
            f"{_of(r)} requests recomputed another number of tokens than their budget: {names(r.names)}."
        ),
    }
)
_COMPARISONS: Mapping[str, str] = MappingProxyType(
    {
        "reference": "no answer with full prefill",
        "orders": "no two orders",
        "repeat": "no answer with the repeat control",
        "noise": "no full prefill with its repeat",
    }
)


def finding_line(finding: Finding, figures: Sequence[Figure]) -> str:
    """The finding in one line: what was seen and the number behind it."""
    head = f"{visible(finding.policy)}: {SEEN[finding.seen]}"
    if finding.seen == "inconclusive":
        more = len(finding.reasons) - 1
        rest = f" (and {counted(more, 'further reason')})" if more else ""
        return f"{head}. {reason_sentence(finding.reasons[0])}{rest}"
    if finding.seen == "none-seen":
        return (
            f"{head}. No answer differed between orders on {counted(finding.compared, 'request')}; smallest share of "
            f"affected requests that would have shown: {percent(finding.smallest_visible)}{in_blocks(finding.block)}."
        )
    variation = select(figures, "answer_variation", finding.policy)[0]
    return (
        f"{head}. {finding.flipped:,} of {counted(finding.compared, 'request')} changed with the order; answer "
        f"variation {percent(variation.value)} (95 % interval {interval(variation)} %)."
    )


def finding_details(finding: Finding) -> list[str]:
    """What stands behind the finding, a sentence each."""
    if finding.seen == "inconclusive":
        sentences = [reason_sentence(reason) for reason in finding.reasons]
    elif finding.seen == "history-sensitive":
        sentences = [_reproduced(finding)]
    else:
        sentences = []
    if finding.flipped:
        more = finding.flipped - min(MOST_NAMES, len(finding.examples))
        shown = ", ".join(visible(name) for name in finding.examples[:MOST_NAMES])
        sentences.append(f"Changed with the order: {shown}" + (f" and {more:,} more." if more else "."))
    if finding.reset_compared:
        sentences.append(_own_error(finding))
    if finding.overlap > finding.block and finding.compared:
        sentences.append(_short_stream(finding))
    return sentences


def gate_sentence(result: GateResult) -> str:
    head = f"{result.outcome}: {gate_line(result)}"
    if result.value is None:
        return f"{head}: {'nothing was measured' if result.gate in _ABSOLUTE else 'nothing could be paired'}."
    where = f" in the worst order ({visible(result.order)})" if result.order else ""
    value = f"{head}; observed {_gate_value(result, result.value)}{where}"
    if result.why == "broken" and result.gate in _ABSOLUTE:
        return f"{value}, on {counted(result.n, 'request')}."
    if result.why == "finding-inconclusive":
        return f"{value}, but the finding is inconclusive."
    if result.why == "orders-unpaired":
        return f"{value}, but the baseline did not replay every order of this run alike."
    if result.why == "noise-possible":
        return f"{value}, but so few requests changed that run-to-run variation is not ruled out."
    if result.why == "broken":
        return f"{value} on {counted(result.n, 'request')}, and the whole 95 % interval is beyond the limit."
    side = "upper" if result.gate in _UPWARD else "lower"
    bound = f"{value}, 95 % {side} bound {_gate_value(result, result.bound)}{in_blocks(result.overlap)}"
    if result.why == "kept":
        return f"{bound}."
    if result.needed is None:
        return f"{bound}: no number of requests can show that the limit is kept at this value."
    return f"{bound}: {counted(result.n, 'request')} are too few; about {result.needed:,} would be needed."


def gate_line(result: GateResult) -> str:
    """What a gate asks of which policy."""
    return f"{visible(result.policy)}, {_GATES[result.gate](result)}"


_ABSOLUTE = frozenset({"min-fidelity", "max-variation"})
_UPWARD = frozenset({"max-variation", "max-variation-rise"})
_GATES: Mapping[Gate, Callable[[GateResult], str]] = MappingProxyType(
    {
        "min-fidelity": lambda r: f"fidelity at least {_limit(r.limit)} %",
        "max-variation": lambda r: f"answer variation at most {_limit(r.limit)} %",
        "non-inferior": lambda r: f"fidelity at most {_limit(r.limit)} points below {visible(r.than or '')}'s",
        "max-fidelity-drop": lambda r: f"fidelity at most {_limit(r.limit)} points below the baseline's",
        "max-variation-rise": lambda r: f"answer variation at most {_limit(r.limit)} points above the baseline's",
    }
)


def _limit(share: float) -> str:
    """A limit as the user set it, in percent."""
    return f"{100 * share:.10g}"


def _gate_value(result: GateResult, value: float | None) -> str:
    return percent(value) if result.gate in _ABSOLUTE else f"{points(value)} points"


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


def baseline_lines(audit: Audit, baseline: Baseline) -> list[str]:
    """What was held against what, and what became of the findings."""
    trace = baseline.manifest.get("trace")
    source = trace.get("source") if isinstance(trace, Mapping) else None
    finished = visible(str(baseline.manifest.get("finished") or "never"))
    lines = [
        f"The baseline replayed {visible(str(source))}, finished {finished}.",
        f"{counted(baseline.requests, 'request')} have the same prompt in both runs; {baseline.only_now:,} only now, "
        f"{baseline.only_before:,} only before.",
    ]
    seen_before = {finding.policy: SEEN[finding.seen] for finding in baseline.findings}
    for finding in audit.findings:
        before = seen_before.get(finding.policy, "not audited")
        lines.append(f"{visible(finding.policy)}: was {before}, is {SEEN[finding.seen]}.")
    lines += [f"{visible(policy)}: no longer audited." for policy in baseline.policies_only_before]
    if baseline.unpaired:
        orders = [f"{policy} {order}" for policy, order in baseline.unpaired]
        lines.append(f"Not replayed alike in the baseline, and so not compared: {names(orders)}.")
    if not baseline.changes:
        lines.append("Nothing could be paired: the runs share no request, policy and order.")
    return lines


def setting_lines(baseline: Baseline) -> list[str]:
    """Settings, versions and engine facts that differ, a line each."""
    return [
        f"{visible(setting.name)}: {_setting_value(setting.before)} -> {_setting_value(setting.now)}"
        for setting in baseline.settings
    ]


def change_cells(change: Change) -> list[str]:
    """A changed figure as cells: before, now, points, 95 % interval, Holm-adjusted p-value."""
    figure = change.figure
    points = "-" if figure.value is None else f"{100 * figure.value:+.1f}"
    return [percent(change.before), percent(change.now), points, interval(figure), p_value(figure.p_adjusted)]


def flips_line(flips: Flips) -> str:
    """Which requests change with the order now and did not before, and the reverse."""
    parts = [
        f"{counted(len(ids), 'request')} {what}" + (f": {names(ids, MOST_FLIPS)}" if ids else "")
        for ids, what in ((flips.newly, "newly flip"), (flips.no_longer, "no longer do"))
    ]
    return f"{visible(flips.policy)}: {'; '.join(parts)}."


def _setting_value(value: object) -> str:
    return "unset" if value is None else visible(str(value))


def headline(audit: Audit) -> list[str]:
    """The audit in a line for each policy and one for the verdict: what `kvaudit replay` prints at its end."""
    lines = [finding_line(finding, audit.figures) for finding in audit.findings]
    return [*(lines or ["No policy was audited."]), verdict_line(audit.verdict)]


def tested(figures: Sequence[Figure]) -> str:
    """The test behind a family of contrasts, how it counted requests, and the family."""
    tests = dict.fromkeys((figure.test or "").partition(";")[0] for figure in figures)
    test = " or ".join(tests)
    return f"{test[:1].upper()}{test[1:]}; Holm over {counted(len(figures), 'comparison')}."


def in_blocks(block: int) -> str:
    """How requests that share content were counted; nothing where each counts for itself."""
    return f" (requests counted in blocks of {block}, since their windows overlap)" if block > 1 else ""


def points(share: float | None) -> str:
    """A difference of two shares in percentage points, with its sign."""
    return "-" if share is None else f"{100 * share:+.1f}"


class PowerRow(NamedTuple):
    """What the comparison of two policies could have seen, in the order that can see least."""

    policies: str
    weakest: str
    smallest: str
    needed: tuple[str, ...]


POWER_NOTE = (
    "the smallest difference of fidelity, in points, that exact McNemar at 5 %, before Holm's adjustment, finds with "
    "80 % probability in the order that can see least (none: not even 100 points)"
)


def power_rows(figures: Sequence[Figure]) -> list[PowerRow]:
    """A row for each pair of policies; `needed` holds the requests that would show each of `figures.POINTS`."""
    rows = []
    found = select(figures, "smallest_difference", control="none")
    for pair in dict.fromkeys(figure.policy for figure in found):
        mine = [figure for figure in found if figure.policy == pair]
        weakest = max(mine, key=lambda figure: math.inf if figure.value is None else figure.value)
        smallest = "none" if weakest.value is None else f"{100 * weakest.value:.1f}"
        needed = [next(iter(select(figures, requests_metric(size), pair)), None) for size in POINTS]
        counts = ("-" if figure is None or figure.value is None else f"{figure.value:,.0f}" for figure in needed)
        rows.append(PowerRow(pair or "", weakest.order or "", smallest, tuple(counts)))
    return rows


def condition(figure: Figure) -> str:
    """A figure's order, or its control in brackets."""
    return visible(figure.order or "") if figure.control == "none" else f"({visible(figure.control or '')})"


def cochran_sentence(figure: Figure) -> str:
    where = f", {condition(figure)}" if figure.order else ", all orders"
    place = f"{visible(figure.policy or 'all policies')}{where}"
    if figure.p_value is None:
        return f"{place}: every request is answered alike, so there is nothing for Cochran's Q to test."
    return (
        f"{place}: Cochran's Q {number(figure.value)}, p {p_value(figure.p_value)}, {p_value(figure.p_adjusted)} by "
        f"{(figure.test or '').rpartition('; ')[2]}."
    )


def equality_sentences(figures: Sequence[Figure]) -> list[str]:
    """Whether the policies recomputed the same number of tokens in each order; nothing where that is not known."""
    known = select(figures, "recomputed_equal")
    unequal = [condition(figure) for figure in known if not figure.value]
    if unequal:
        return [f"The policies did not recompute the same number of tokens in: {', '.join(unequal)}."]
    return ["All policies with a partial budget recomputed the same number of tokens in each order."] if known else []


def answer_facts(answer: Answer) -> str:
    """How an answer differs from full prefill's, in one sentence; nothing where that was not measured."""
    facts = []
    if answer.edit_distance is not None:
        facts.append(f"edit distance {answer.edit_distance:,}")
    if answer.first_difference is not None:
        facts.append(f"first difference at token {answer.first_difference}")
    if answer.margin is not None:
        facts.append(f"margin of the two best logits there {number(answer.margin)}")
    line = ", ".join(facts)
    return f"{line[0].upper()}{line[1:]}." if facts else ""


def context_sentence(example: Example) -> str:
    """How much of what the damaged answer reused had been computed in another context."""
    foreign = sum(not origin.same_context for origin in example.origins)
    return (
        f"In {visible(example.arms[0])} {foreign} of {counted(len(example.origins), 'reused segment')} had been "
        "computed after other tokens than stand before them now."
    )


def _of(reason: Reason) -> str:
    return f"{reason.count:,} of {reason.total:,}"


def _reproduced(finding: Finding) -> str:
    if finding.repeat_losses:
        return (
            f"The repeat control answered {finding.repeat_losses:,} of {counted(finding.repeat_compared, 'request')} "
            "differently, which the noise limit allows: more changed with the order than that explains."
        )
    head = "The repeat control reproduced every answer"
    chance = finding.chance_of_reproducing
    if chance is None:
        return f"{head}."
    what = "if answers varied at random from run to run, request by request, it would have done so with probability"
    end = "such noise is ruled out" if finding.noise_excluded else "such noise is not ruled out"
    return f"{head}; {what} {p_value(chance)}: {end}."


def _short_stream(finding: Finding) -> str:
    return (
        f"About {finding.overlap} successive requests share content, and on so short a stream only {finding.block} of "
        f"them are counted as one: intervals and p-values may promise too much. Limits count all {finding.overlap}."
    )


def _own_error(finding: Finding) -> str:
    head = "With the cache emptied before each request"
    if not finding.reset_reuses:
        return f"{head} nothing is reused: what is lost to history and what to the {OWN_ERROR} cannot be told apart."
    if finding.own_losses:
        return (
            f"{head} {finding.own_losses:,} of {finding.reset_compared:,} answers still differ from full prefill's: so "
            f"much is the {OWN_ERROR}."
        )
    history = ": what is lost in the orders is history" if finding.seen == "history-sensitive" else ""
    return f"{head} all {finding.reset_compared:,} answers equal full prefill's{history}."
