"""What every figure of the `summary` table is (DESIGN 3, Measures)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Metric:
    """row: what there is a row for. value: what value, low and high are; no interval is named where there is none."""

    row: str
    value: str


_ARM = "policy, order, control"
_PAIR = "two policies `a - b`, order, control"
_TESTED = "the wider of the adjusted Wald and the score interval; exact McNemar test, Holm over all rows of this metric"

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "fidelity": Metric(_ARM, "share of answers equal to full prefill's, Wilson interval"),
        "accuracy": Metric(_ARM, "share of answers equal to the trace's expected answer, Wilson interval"),
        "edit_distance": Metric(_ARM, "mean edit distance, in characters, of the n answers that differ"),
        "empty_answers": Metric("full prefill", "share of answers without a character, Wilson interval"),
        "answer_variation": Metric(
            "policy", "mean over requests of the share of order pairs with different answers, bootstrap interval"
        ),
        "fleiss_kappa": Metric(
            "policy",
            "Fleiss' kappa of its orders: agreement beyond that of orders which hand out the same answers at random, "
            "1 where all agree; over the n requests that every order answered",
        ),
        "flipped_requests": Metric(
            "policy", "share of requests that any two orders answer differently, Wilson interval"
        ),
        "smallest_variation": Metric(
            "policy", "smallest share of affected requests of which one would have shown with 95 % probability"
        ),
        "variation_difference": Metric(
            "two policies `a - b`", "difference of answer variation on the same requests, bootstrap interval"
        ),
        "noise_floor": Metric("full prefill", "share of answers that a second run did not reproduce, Wilson interval"),
        "repeat_disagreement": Metric(
            "policy", "share of answers that the repeat control did not reproduce, Wilson interval"
        ),
        "chance_of_reproducing": Metric(
            "policy",
            "p_value: probability that the repeat control reproduces every answer if answers vary from run to run and "
            "not with the order",
        ),
        "rounding_disagreement": Metric(
            "policy, order", "share of answers that the rounding control did not reproduce, Wilson interval"
        ),
        "rounding_selections": Metric(
            "policy, order",
            "share of requests of which, or of whose prelude, a recomputed token was chosen only because of how "
            "signals were rounded, Wilson interval",
        ),
        "fidelity_difference": Metric(_PAIR, f"difference of fidelity on the same requests, {_TESTED}"),
        "smallest_difference": Metric(
            _PAIR,
            "smallest difference of fidelity that an exact McNemar test at 5 % on these requests finds with 80 % "
            "probability, as many of them discordant as here",
        ),
        **{
            f"requests_for_{points}_point{'s' if points > 1 else ''}": Metric(
                "two policies `a - b`",
                f"requests from which on such a test finds a difference of {points} % of requests with 80 % "
                "probability, as many of them discordant as in the order where most are: order and n are that one's",
            )
            for points in (1, 2, 3, 5)
        },
        "cochran_policies": Metric("order, control", "Cochran's Q over three or more policies, Holm over all rows"),
        "order_difference": Metric(
            "policy, two orders `a - b`", f"difference of fidelity on the same requests, {_TESTED}"
        ),
        "cochran_orders": Metric("policy", "Cochran's Q over three or more orders, Holm over all rows"),
        "history_loss": Metric("policy, order", f"fidelity under reset minus fidelity in this order, {_TESTED}"),
        "fidelity_change": Metric(
            _ARM, f"fidelity now minus fidelity in the baseline run, on the requests of both, {_TESTED}"
        ),
        "variation_change": Metric(
            "policy", "answer variation now minus that of the baseline run, on the requests of both, bootstrap interval"
        ),
        "ttft_median": Metric(
            "policy", "median time to first token over all orders, milliseconds; n requests times orders"
        ),
        "ttft_p95": Metric("policy", "95th percentile of the same times, milliseconds"),
        "ttft_speedup": Metric(
            "policy", "median over n requests of the median over orders of full prefill's time over the policy's"
        ),
        "kl_mean": Metric(_ARM, "mean over requests of the KL divergence from full prefill, nats a token"),
        "kl_median": Metric(_ARM, "median of the same"),
        "reference_logprob_mean": Metric(_ARM, "mean over requests of the full-prefill answer's log-probability, nats"),
        "reference_logprob_median": Metric(_ARM, "median of the same"),
        "fragmentation": Metric(_ARM, "median number of runs of neighbouring tokens in the selection; quartiles"),
        "captured_deviation": Metric(_ARM, "median share of the token deviation that was recomputed; quartiles"),
        "recomputed_tokens": Metric(_ARM, "tokens that were recomputed, in all"),
        "budget_tokens": Metric(_ARM, "tokens that the budget allowed, in all"),
        "reuse_share": Metric(_ARM, "reused tokens over prompt tokens"),
        "recomputed_equal": Metric(
            "order, control",
            "1 when all n policies recomputed the same total, 0 when not; without policies that recompute nothing or "
            "everything, and without orders in which a policy answered fewer requests than another",
        ),
    }
)
"""By the name in the column `metric`. The first request of every arm is warm-up and left out of times.

Where windows overlap, bootstraps resample blocks of the stream, and intervals and tests count as many requests as there
are blocks: the column `test` says so. A bootstrap's bound is never closer than the one that holds whatever the values.
"""
