"""Sections about work: time to first token, what was selected and recomputed, divergence from full prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from kvaudit.analysis.figures import Figure, select
from kvaudit.reports.terminal.layout import (
    Place,
    condition,
    figure_at,
    grouped_table,
    heading,
    place_of,
    sentences,
    table,
)
from kvaudit.reports.words.figures import equality_sentences
from kvaudit.reports.words.numbers import number, percent, small

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def parts(audit: Audit) -> Iterator[RenderableType]:
    yield from _ttft(audit)
    yield from _selection(audit)
    yield from _divergence(audit)


def _ttft(audit: Audit) -> Iterator[RenderableType]:
    rows = []
    for median in select(audit.figures, "ttft_median"):
        p95 = select(audit.figures, "ttft_p95", median.policy)[0]
        speedup = next(iter(select(audit.figures, "ttft_speedup", median.policy)), None)
        rows.append(
            [
                median.policy or "",
                f"{number(median.value, 1)} ms",
                f"{number(p95.value, 1)} ms",
                f"{number(speedup.value)}x" if speedup else "-",
                f"{median.n or 0:,}",
            ]
        )
    if rows:
        yield from heading("Time to first token (TTFT)")
        yield table(("policy", "median", "P95", "speed-up", "serves"), rows)
        yield from sentences(
            [
                "speed-up: median over requests of full prefill's TTFT over the policy's, itself the median over a "
                "request's orders. serves: requests times orders; the first request of every arm is warm-up and left "
                "out."
            ]
        )


def _selection(audit: Audit) -> Iterator[RenderableType]:
    rows = []
    for place in _places(audit, ("recomputed_tokens", "fragmentation", "captured_deviation", "reuse_share")):
        runs, captured = figure_at(audit, "fragmentation", place), figure_at(audit, "captured_deviation", place)
        recomputed, reuse = figure_at(audit, "recomputed_tokens", place), figure_at(audit, "reuse_share", place)
        budget = figure_at(audit, "budget_tokens", place)
        rows.append(
            [
                place[0] or "",
                condition(place),
                f"{number(runs.value, 1)} ({number(runs.low, 0)}-{number(runs.high, 0)})" if runs else "-",
                f"{percent(captured.value)} ({_percents(captured)})" if captured else "-",
                number(recomputed.value if recomputed else None, 0),
                number(budget.value if budget else None, 0),
                percent(reuse.value if reuse else None, 0),
            ]
        )
    if not rows:
        return
    yield from heading("What was recomputed")
    yield grouped_table(("policy, order", "runs", "captured", "tokens", "budget", "reused"), rows)
    yield from sentences(
        [
            "runs: separate regions a request (fragmentation); captured: share of the token deviation that was "
            "recomputed; both median and quartiles. tokens, budget: recomputed in all and what was to be. reused: "
            "share of prompt tokens from the cache.",
            *equality_sentences(audit.figures),
        ]
    )


def _divergence(audit: Audit) -> Iterator[RenderableType]:
    metrics = ("kl_mean", "kl_median", "reference_logprob_mean", "reference_logprob_median")
    rows = []
    for place in _places(audit, metrics):
        found = [figure_at(audit, metric, place) for metric in metrics]
        cells = [small(figure.value if figure else None) for figure in found]
        rows.append([place[0] or "", condition(place), *cells])
    if rows:
        yield from heading("Divergence from full prefill, teacher-forced over its answer")
        yield grouped_table(("policy, order", "KL mean", "KL median", "log-p mean", "log-p median"), rows)
        yield from sentences(["KL in nats a token; log-p: log-probability of the full-prefill answer, in nats."])


def _places(audit: Audit, metrics: tuple[str, ...]) -> list[Place]:
    found = [figure for figure in audit.figures if figure.metric in metrics]
    return list(dict.fromkeys(place_of(figure) for figure in found))


def _percents(figure: Figure) -> str:
    low, high = figure.low or 0, figure.high or 0
    return f"{100 * low:.1f}-{100 * high:.1f}"
