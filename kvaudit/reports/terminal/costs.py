"""Sections about work: time to first token, what was selected and recomputed, divergence from full prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from kvaudit.analysis.figures import Figure, select
from kvaudit.reports.terminal.layout import grouped_table, heading, sentences, table
from kvaudit.reports.words import number, percent, small

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

Place = tuple[str | None, str | None, str | None]


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
        yield table(("policy", "median", "P95", "speed-up", "requests"), rows)
        yield from sentences(
            [
                "speed-up: median over requests of full prefill's TTFT over the policy's, all orders. The first "
                "request of every arm is warm-up and left out."
            ]
        )


def _selection(audit: Audit) -> Iterator[RenderableType]:
    rows = []
    for place in _places(audit, ("recomputed_tokens", "fragmentation", "captured_deviation", "reuse_share")):
        runs, captured = _at(audit, "fragmentation", place), _at(audit, "captured_deviation", place)
        recomputed, reuse = _at(audit, "recomputed_tokens", place), _at(audit, "reuse_share", place)
        budget = _at(audit, "budget_tokens", place)
        rows.append(
            [
                place[0] or "",
                _condition(place),
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
            "runs: separate regions a request (fragmentation); captured: share of the key deviation that was "
            "recomputed; both median and quartiles. tokens, budget: recomputed in all and what was to be. reused: "
            "share of prompt tokens from the cache.",
            *_equality(audit),
        ]
    )


def _equality(audit: Audit) -> list[str]:
    figures = select(audit.figures, "recomputed_equal")
    unequal = [_condition((None, figure.order, figure.control)) for figure in figures if not figure.value]
    if not figures:
        return []
    if unequal:
        return [f"The policies did not recompute the same number of tokens in: {', '.join(unequal)}."]
    return ["All policies with a partial budget recomputed the same number of tokens in each order."]


def _divergence(audit: Audit) -> Iterator[RenderableType]:
    metrics = ("kl_mean", "kl_median", "reference_logprob_mean", "reference_logprob_median")
    rows = []
    for place in _places(audit, metrics):
        found = [_at(audit, metric, place) for metric in metrics]
        cells = [small(figure.value if figure else None) for figure in found]
        rows.append([place[0] or "", _condition(place), *cells])
    if rows:
        yield from heading("Divergence from full prefill, teacher-forced over its answer")
        yield grouped_table(("policy, order", "KL mean", "KL median", "log-p mean", "log-p median"), rows)
        yield from sentences(["KL in nats a token; log-p: log-probability of the full-prefill answer, in nats."])


def _places(audit: Audit, metrics: tuple[str, ...]) -> list[Place]:
    found = [figure for figure in audit.figures if figure.metric in metrics]
    return list(dict.fromkeys((figure.policy, figure.order, figure.control) for figure in found))


def _at(audit: Audit, metric: str, place: Place) -> Figure | None:
    return next(iter(select(audit.figures, metric, *place)), None)


def _condition(place: Place) -> str:
    return (place[1] or "") if place[2] == "none" else f"({place[2]})"


def _percents(figure: Figure) -> str:
    low, high = figure.low or 0, figure.high or 0
    return f"{100 * low:.0f}-{100 * high:.0f}"
