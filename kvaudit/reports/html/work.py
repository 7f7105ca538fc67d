"""Sections about work: time to first token, what was recomputed and reused, divergence from full prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvaudit.analysis.figures import Figure, select
from kvaudit.reports.html.answers import at, mark_of, policy_keys
from kvaudit.reports.html.charts import Curve, curves, scatter
from kvaudit.reports.html.drawing import policy_mark
from kvaudit.reports.html.parts import Picture, Section, Table, listed, short, table
from kvaudit.reports.words.figures import condition, equality_sentences
from kvaudit.reports.words.numbers import number, percent, small

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

Floats = NDArray[np.float64]

POSITION_BINS = 40
MOST_NUMBERS = 30


def sections(audit: Audit) -> Iterator[Section]:
    yield Section("ttft", "Time to first token", tables=tuple(_ttft(audit)))
    yield Section(
        "selection",
        "What was recomputed and reused",
        pictures=(*_fragmentation_picture(audit), *_reuse_picture(audit)),
        tables=tuple(_selection(audit)),
    )
    yield Section("divergence", "Divergence from full prefill", tables=tuple(_divergence(audit)))


def _ttft(audit: Audit) -> list[Table]:
    rows = []
    for median in select(audit.figures, "ttft_median"):
        p95, speedup = at(audit, "ttft_p95", median), at(audit, "ttft_speedup", median)
        rows.append(
            [
                short(median.policy),
                f"{number(median.value, 1)} ms",
                f"{number(p95.value, 1)} ms" if p95 else "-",
                f"{number(speedup.value)}x" if speedup else "-",
                f"{median.n or 0:,}",
            ]
        )
    notes = [
        "Speed-up: median over requests of full prefill's time over the policy's, itself the median over a request's "
        "orders. Serves: requests times orders; the first request of every arm is warm-up and left out."
    ]
    return table("Time to first token (TTFT)", ("policy", "median", "P95", "speed-up", "serves"), rows, notes)


def _selection(audit: Audit) -> list[Table]:
    metrics = ("fragmentation", "captured_deviation", "recomputed_tokens", "budget_tokens", "reuse_share")
    rows = []
    for place in _places(audit, metrics):
        runs, captured, recomputed, budget, reuse = (at(audit, metric, place) for metric in metrics)
        rows.append(
            [
                short(place.policy),
                condition(place),
                number(runs.value, 1) if runs else "-",
                f"{number(runs.low, 0)} to {number(runs.high, 0)}" if runs else "-",
                percent(captured.value) if captured else "-",
                f"{100 * (captured.low or 0):.1f} to {100 * (captured.high or 0):.1f}" if captured else "-",
                number(recomputed.value if recomputed else None, 0),
                number(budget.value if budget else None, 0),
                percent(reuse.value if reuse else None, 0),
            ]
        )
    columns = ("policy", "order", "runs", "quartiles", "captured", "quartiles", "tokens", "budget", "reused")
    notes = [
        "Runs: separate regions that were recomputed in a request (fragmentation), median. Captured: share of the "
        "token deviation that was recomputed, median. Tokens, budget: recomputed in all, and what was to be. Reused: "
        "share of prompt tokens from the cache.",
        *equality_sentences(audit.figures),
    ]
    return table("Fragmentation and captured deviation", columns, rows, notes, labels=2)


def _divergence(audit: Audit) -> list[Table]:
    metrics = ("kl_mean", "kl_median", "reference_logprob_mean", "reference_logprob_median")
    rows = []
    for place in _places(audit, metrics):
        found = [at(audit, metric, place) for metric in metrics]
        rows.append([short(place.policy), condition(place), *(small(f.value if f else None) for f in found)])
    columns = ("policy", "order", "KL mean", "KL median", "log-p mean", "log-p median")
    notes = [
        "Teacher-forced over full prefill's answer. KL in nats a token: 0 is no divergence. Log-p: log-probability of "
        "full prefill's answer, in nats."
    ]
    return table("Divergence from full prefill", columns, rows, notes, labels=2)


def _places(audit: Audit, metrics: tuple[str, ...]) -> list[Figure]:
    """One figure for each policy, order and control that any of the metrics has."""
    found = {(f.policy, f.order, f.control): f for f in reversed(audit.figures) if f.metric in metrics}
    return [f for f in audit.figures if found.get((f.policy, f.order, f.control)) is f]


def _fragmentation_picture(audit: Audit) -> Iterator[Picture]:
    pairs = [
        (runs, fidelity)
        for runs in select(audit.figures, "fragmentation", control="none")
        if (fidelity := at(audit, "fidelity", runs)) is not None and fidelity.value is not None
    ]
    if not pairs:
        return
    points = [(mark_of(audit, runs.policy), runs.value or 0.0, 100 * (equal.value or 0)) for runs, equal in pairs]
    numbers = [
        f"{short(runs.policy)}, {condition(runs)} {number(runs.value, 1)} runs, {percent(equal.value)}"
        for runs, equal in pairs
    ]
    summary = f"Fragmentation and fidelity of each policy and order: {listed(numbers, MOST_NUMBERS)}."
    yield Picture(
        "fragmentation",
        "Fragmentation against fidelity",
        "A point is a policy in one order: how many separate regions it recomputes (median), and how many answers "
        "equal full prefill's. Points that fall to the right: scattered recomputation does worse.",
        summary,
        scatter("fragmentation", points, ("recomputed regions a request, median", "fidelity, %"), summary),
        policy_keys(audit, [runs.policy for runs, _ in pairs]),
    )


def _reuse_picture(audit: Audit) -> Iterator[Picture]:
    lines, shown, numbers = [], [], []
    for index, policy in enumerate(audit.grid.policies):
        binned = _reuse_by_position(audit, policy)
        if binned is None:
            continue
        places, low, middle, high = binned
        lines.append(Curve(policy_mark(index), places, middle, low, high))
        shown.append(policy)
        numbers.append(f"{short(policy)} from {middle[0]:.0f} % to {middle[-1]:.0f} %")
    if not lines:
        return
    summary = f"Median share of prompt tokens from the cache, first to last position: {listed(numbers, MOST_NUMBERS)}."
    yield Picture(
        "reuse",
        "Reuse against position in the run",
        "Share of a prompt's tokens that came from the cache, by when the request was served, over all orders: median "
        "and quartiles. It should rise as the cache fills; near zero there is no history to be sensitive to. Policies "
        "that reuse alike lie on each other.",
        summary,
        curves("reuse", lines, ("position in the run", "prompt tokens reused, %"), summary),
        policy_keys(audit, shown),
    )


def _reuse_by_position(audit: Audit, policy: str) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Centres of the bins, and quartiles and median of the reuse share in each: float64 [B], percent."""
    columns = [
        audit.grid.columns(("position", "reused_tokens", "prompt_tokens"), arm) for arm in audit.grid.find(policy)
    ]
    if not columns:
        return None
    position, reused, prompt = (np.concatenate([arm[name] for arm in columns]) for name in columns[0])
    known = np.isfinite(position) & np.isfinite(reused) & (prompt > 0)
    if not known.any():
        return None
    position, share = position[known], 100 * reused[known] / prompt[known]
    bins = min(POSITION_BINS, int(position.max()) + 1)
    width = (position.max() + 1) / bins
    bin_of = np.minimum((position / width).astype(np.int64), bins - 1)
    taken = [share[bin_of == index] for index in range(bins)]
    filled = [index for index in range(bins) if len(taken[index])]
    low, middle, high = np.array([np.quantile(taken[index], (0.25, 0.5, 0.75)) for index in filled]).T
    return (np.array(filled) + 0.5) * width + 0.5, low, middle, high
