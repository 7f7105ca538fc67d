"""What the audit saw of a policy, and why where it cannot say, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvaudit.analysis.checks import Reason, ReasonCode
from kvaudit.analysis.figures import Figure, select
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.reproduction import IMMATERIAL
from kvaudit.reports.escape import visible
from kvaudit.reports.words.numbers import MOST_NAMES, counted, in_blocks, interval, names, p_value, percent

OWN_ERROR = "own error of the policy and the engine's switches"
SEEN: Mapping[str, str] = MappingProxyType(
    {"history-sensitive": "history-sensitive", "none-seen": "none seen", "inconclusive": "inconclusive"}
)


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
        "reference-unverified": lambda r: (
            f"Nobody can tell whether {counted(r.count, 'full-prefill answer')} reused cached tokens: the server does "
            f"not count them ({_COUNTING})."
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
        "noise-possible": lambda r: (
            f"{counted(r.count, 'request')} changed with the order; if answers varied at random from run to run, the "
            f"repeat control would have reproduced them by luck with probability {p_value(r.limit)}: such noise is not "
            "ruled out (more orders or more requests would tell)."
        ),
        "cold-differs": lambda r: (
            f"{_of(r)} requests of which nothing was cached got another answer than full prefill's: the counter, the "
            "reset or the reference is not to be trusted, or answers vary."
        ),
        "rounding-differs": lambda r: (
            f"No answer changed with the order, but {_of(r)} did where the signals that rank tokens were rounded "
            "otherwise."
        ),
        "within-rounding": lambda r: (
            "Rounding decides which tokens are recomputed in every order that differs"
            + (f", and {_of(r)} answers change where signals are rounded otherwise" if r.count else "")
            + ": that may explain what changed with the order."
        ),
        "nothing-reused": lambda r: "Nothing was reused in any order: there was no history to be sensitive to.",
        "reuse-unknown": lambda r: f"The engine did not say whether any cached token was reused ({_COUNTING}).",
        "cache-not-empty": lambda r: (
            f"The cache was not empty at {counted(r.count, 'start')} from an empty cache: {names(r.names)}."
        ),
        "cache-unverified": lambda r: (
            f"It could not be verified that the cache was empty at {counted(r.count, 'start')}: {names(r.names)}."
        ),
        "budget-missed": lambda r: (
            f"{_of(r)} requests recomputed another number of tokens than their budget: {names(r.names)}."
        ),
        "retried": lambda r: (
            f"{_of(r)} requests had to be sent again, which changes the history; the limit is {percent(r.limit)} of an "
            f"arm: {names(r.names)}."
        ),
    }
)
_COUNTING = (
    "vLLM does with --enable-prompt-tokens-details and in /metrics, SGLang with --enable-cache-report or, in /metrics, "
    "--enable-metrics, llama.cpp in its timings"
)
_COMPARISONS: Mapping[str, str] = MappingProxyType(
    {
        "reference": "no answer with full prefill",
        "orders": "no two orders",
        "repeat": "no answer with the repeat control",
        "noise": "no full prefill with its repeat",
    }
)


_NOT_EMPTIED: frozenset[ReasonCode] = frozenset({"cache-not-empty", "cache-unverified"})
LITTLE = 0.1
"""A smaller share of prompt tokens from a cache is told with the finding."""


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
            f"{_little_reused(finding)}"
        )
    variation = select(figures, "answer_variation", finding.policy)[0]
    return (
        f"{head}. {finding.flipped:,} of {counted(finding.compared, 'request')} changed with the order; answer "
        f"variation {percent(variation.value)} (95 % interval {interval(variation)} %)."
        + (" Full prefill's answers are in doubt." if finding.reasons else "")
    )


def details_beside_line(finding: Finding) -> list[str]:
    """What stands behind the finding and not in its line."""
    in_line = finding.seen == "inconclusive" and len(finding.reasons) == 1
    return finding_details(finding)[in_line:]


def finding_details(finding: Finding) -> list[str]:
    """What stands behind the finding, a sentence each."""
    if finding.seen == "inconclusive":
        sentences = [reason_sentence(reason) for reason in finding.reasons]
    elif finding.seen == "history-sensitive":
        sentences = [_reproduced(finding), *map(reason_sentence, finding.reasons)]
    else:
        sentences = []
    if finding.flipped:
        more = finding.flipped - min(MOST_NAMES, len(finding.examples))
        shown = ", ".join(visible(name) for name in finding.examples[:MOST_NAMES])
        sentences.append(f"Changed with the order: {shown}" + (f" and {more:,} more." if more else "."))
    if finding.seen != "none-seen" and (little := _little_reused(finding)):
        sentences.append(little.strip())
    if finding.reset_compared and not any(reason.code in _NOT_EMPTIED for reason in finding.reasons):
        sentences.append(_own_error(finding))
    if finding.rounding_served:
        sentences.append(_rounding(finding))
    if finding.overlap > finding.block and finding.compared:
        sentences.append(_short_stream(finding))
    return sentences


def _little_reused(finding: Finding) -> str:
    if finding.reused_share is None or finding.reused_share >= LITTLE:
        return ""
    share = percent(finding.reused_share)
    return f" Only {share} of the prompts' tokens came from a cache: there was little history to be sensitive to."


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


def _rounding(finding: Finding) -> str:
    if not finding.rounding_decided:
        return "Rounding decided none of its selections."
    sentence = (
        f"On {finding.rounding_decided:,} of {counted(finding.rounding_served, 'request')} served, rounding chose a "
        "recomputed token"
    )
    if not finding.rounding_matters:
        return (
            f"{sentence}. That does not matter here: rounded otherwise, no answer changes, nor its log-probability by "
            f"more than {IMMATERIAL:g} nats."
        )
    if finding.rounding_compared:
        sentence += f"; rounded otherwise, {finding.rounding_losses:,} of {finding.rounding_compared:,} answers change"
    if finding.seen == "history-sensitive" and finding.flipped_untouched:
        sentence += f"; {counted(finding.flipped_untouched, 'request')} changed between orders that it had not touched"
    return f"{sentence}. Another device or number of threads may give other answers."


def _short_stream(finding: Finding) -> str:
    return (
        f"About {finding.overlap} successive requests share content, and on so short a stream only {finding.block} of "
        f"them are counted as one: intervals and p-values may promise too much. Limits count all {finding.overlap}."
    )


def _own_error(finding: Finding) -> str:
    head = "With the cache emptied before each request"
    if not finding.reset_reuses and finding.own_losses:
        return f"{head} nothing is reused, and yet {finding.own_losses:,} of {finding.reset_compared:,} answers differ."
    if not finding.reset_reuses:
        return f"{head} nothing is reused: what is lost to history and what to the {OWN_ERROR} cannot be told apart."
    if finding.own_losses:
        return (
            f"{head} {finding.own_losses:,} of {finding.reset_compared:,} answers still differ from full prefill's: so "
            f"much is the {OWN_ERROR}."
        )
    where = "orders that rounding did not touch" if finding.touched else "orders"
    history = f": what is lost in the {where} is history" if finding.seen == "history-sensitive" else ""
    return f"{head} all {finding.reset_compared:,} answers equal full prefill's{history}."
