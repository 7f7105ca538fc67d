"""The figures as tables: fidelity, variation, policies against each other, history, controls, times, selections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvaudit.analysis.figures import POINTS, Figure
from kvaudit.reports.markdown.layout import Block, prose, table_head, table_row
from kvaudit.reports.words.figures import (
    CONTROL_METRICS,
    CONTROLS_NOTE,
    POWER_NOTE,
    cochran_sentence,
    condition,
    controlled,
    equality_sentences,
    power_rows,
    tested,
)
from kvaudit.reports.words.findings import OWN_ERROR
from kvaudit.reports.words.numbers import counted, interval, number, p_value, percent, points, small

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


class Index:
    """The figures by metric and by place."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self._rows: dict[str, list[Figure]] = {}
        self._at: dict[tuple[str | None, ...], Figure] = {}
        for figure in figures:
            self._rows.setdefault(figure.metric, []).append(figure)
            self._at.setdefault((figure.metric, figure.policy, figure.order, figure.control), figure)

    @property
    def rows(self) -> list[Figure]:
        return [figure for rows in self._rows.values() for figure in rows]

    def all(self, metric: str) -> list[Figure]:
        return self._rows.get(metric, [])

    def of(self, metric: str) -> list[Figure]:
        """The figures of a metric that have a value."""
        return [figure for figure in self.all(metric) if figure.value is not None]

    def at(self, metric: str, beside: Figure) -> Figure | None:
        """The figure of a metric for the same policy, order and control."""
        return self._at.get((metric, beside.policy, beside.order, beside.control))

    def value(self, metric: str, beside: Figure) -> float | None:
        found = self.at(metric, beside)
        return None if found is None else found.value


def figure_blocks(audit: Audit) -> Iterator[Block]:
    figures = Index(audit.figures)
    for block in (_fidelity, _variation, _policies, _power, _history, _controls, _ttft, _selection):
        yield from block(figures)


def _contrast(figure: Figure) -> list[str]:
    """Difference in points, interval, discordant requests, p and its adjustment."""
    discordant = ":".join(f"{count:,}" for count in figure.discordant or ()) or "-"
    return [points(figure.value), interval(figure), discordant, p_value(figure.p_value), p_value(figure.p_adjusted)]


CONTRAST = ("Points", "95 % interval", "1st:2nd", "p", "p (Holm)")


def figure_table(
    title: str,
    columns: Sequence[str],
    figures: Sequence[Figure],
    row: Callable[[Figure], str],
    note: str,
    names: int = 2,
) -> Iterator[Block]:
    """A table with a row for each figure, nothing without one. `names` columns are text."""
    if figures:
        head = f"### {title}\n\n{table_head(columns, names)}"
        yield Block(head, tuple(row(figure) for figure in figures), len(figures), "rows", note)


def _fidelity(figures: Index) -> Iterator[Block]:
    def row(figure: Figure) -> str:
        values = [
            percent(figure.value),
            interval(figure),
            small(figures.value("kl_mean", figure)),
            percent(figures.value("accuracy", figure)),
            number(figures.value("edit_distance", figure), 1),
            f"{figure.n or 0:,}",
        ]
        return table_row([figure.policy, condition(figure)], values)

    rows = [figure for figure in figures.of("fidelity") if figure.control != "repeat"]
    yield from figure_table(
        "Fidelity: answers equal to full prefill's, token for token",
        ("Policy", "Order", "Equal", "95 % interval", "KL", "Right", "Edits", "Requests"),
        rows,
        row,
        "KL: mean divergence from full prefill in nats a token. Right: answers equal to the trace's expected one. "
        f"Edits: mean edit distance of the answers that differ.{_methods(rows)}",
    )


def _variation(figures: Index) -> Iterator[Block]:
    rows = figures.of("answer_variation")
    kappas = figures.of("fleiss_kappa")
    kappa_column = ("Fleiss' kappa",) if kappas else ()

    def row(figure: Figure) -> str:
        values = [
            percent(figure.value) if figure.metric == "answer_variation" else f"{points(figure.value)} points",
            interval(figure),
            percent(figures.value("flipped_requests", figure)),
            percent(figures.value("smallest_variation", figure)),
            *((number(_kappa(kappas, figure)),) if kappas else ()),
        ]
        return table_row([figure.policy], values)

    yield from figure_table(
        "Answer variation: order pairs with different answers, mean over requests",
        ("Policy", "Variation", "95 % interval", "Requests", "Visible from", *kappa_column),
        [*rows, *figures.of("variation_difference")],
        row,
        "Requests: share that vary. Visible from: the smallest share of affected requests that would have shown with "
        f"95 % probability.{_methods([*rows, *figures.of('variation_difference')])}",
        names=1,
    )


def _kappa(kappas: Sequence[Figure], beside: Figure) -> float | None:
    return next((kappa.value for kappa in kappas if kappa.policy == beside.policy), None)


def _policies(figures: Index) -> Iterator[Block]:
    rows = figures.of("fidelity_difference")
    yield from figure_table(
        "Policy against policy: fidelity on the same requests",
        ("1st - 2nd policy", "Order", *CONTRAST),
        rows,
        lambda figure: table_row([figure.policy, condition(figure)], _contrast(figure)),
        "1st:2nd: requests on which only the first, and only the second, equals full prefill. "
        f"{tested(rows)}{_list(map(cochran_sentence, figures.all('cochran_policies')))}",
    )


def _power(figures: Index) -> Iterator[Block]:
    rows = power_rows(figures.rows)
    if rows:
        columns = ("1st - 2nd policy", "Weakest in", "Points", *(counted(size, "point") for size in POINTS))
        yield Block(
            f"### Power: what this audit could have seen\n\n{table_head(columns, 2)}",
            tuple(table_row([row.policies, row.weakest], [row.smallest, *row.needed]) for row in rows),
            len(rows),
            "rows",
            f"Points: {POWER_NOTE}. The other columns: requests that would show so many points.",
        )


def _history(figures: Index) -> Iterator[Block]:
    resets = {figure.policy: figure for figure in figures.of("fidelity") if figure.control == "reset"}
    rows = [figure for figure in figures.of("history_loss") if figure.policy in resets]

    def row(figure: Figure) -> str:
        own = 100 * (1 - (resets[figure.policy].value or 0.0))
        return table_row([figure.policy, condition(figure)], [number(own, 1), *_contrast(figure)])

    yield from figure_table(
        "Where the loss comes from: history or own error, in points",
        ("Policy", "Order", "Own", "History", *CONTRAST[1:]),
        rows,
        row,
        f"Own: {OWN_ERROR}, what is lost with the cache emptied before each request (reset control). History: what the "
        f"order loses beyond it; 1st is reset, 2nd the order. {tested(rows)}",
    )


def _controls(figures: Index) -> Iterator[Block]:
    yield from figure_table(
        "Controls: a second run of the same order from an empty cache",
        ("Control", "Policy", "Differ", "95 % interval", "Requests"),
        [figure for metric in CONTROL_METRICS for figure in figures.of(metric)],
        lambda figure: table_row(
            [CONTROL_METRICS[figure.metric], controlled(figure)],
            [percent(figure.value), interval(figure), f"{figure.n or 0:,}"],
        ),
        CONTROLS_NOTE,
    )


def _ttft(figures: Index) -> Iterator[Block]:
    def row(figure: Figure) -> str:
        speedup = figures.value("ttft_speedup", figure)
        values = [
            number(figure.value, 1),
            number(figures.value("ttft_p95", figure), 1),
            "-" if speedup is None else f"{number(speedup)}x",
            f"{figure.n or 0:,}",
        ]
        return table_row([figure.policy], values)

    yield from figure_table(
        "Time to first token (TTFT)",
        ("Policy", "Median (ms)", "P95 (ms)", "Speed-up", "Serves"),
        figures.of("ttft_median"),
        row,
        "Speed-up: median over requests of full prefill's TTFT over the policy's, itself the median over a request's "
        "orders. Serves: requests times orders; the first request of every arm is warm-up and left out.",
        names=1,
    )


def _selection(figures: Index) -> Iterator[Block]:
    def row(figure: Figure) -> str:
        runs, captured = figures.at("fragmentation", figure), figures.at("captured_deviation", figure)
        values = [
            f"{number(runs.value, 1)} ({number(runs.low, 0)}-{number(runs.high, 0)})" if runs else "-",
            f"{percent(captured.value)} ({interval(captured)})" if captured else "-",
            number(figure.value, 0),
            number(figures.value("budget_tokens", figure), 0),
            percent(figures.value("reuse_share", figure), 0),
        ]
        return table_row([figure.policy, condition(figure)], values)

    yield from figure_table(
        "What was recomputed",
        ("Policy", "Order", "Runs", "Captured", "Tokens", "Budget", "Reused"),
        figures.of("recomputed_tokens"),
        row,
        "Runs: separate regions a request (fragmentation). Captured: share of the token deviation that was recomputed. "
        "Both: median and quartiles. Tokens, budget: recomputed in all and what was to be. Reused: share of prompt "
        f"{' '.join(['tokens from the cache.', *map(prose, equality_sentences(figures.of('recomputed_equal')))])}",
    )


def _list(sentences: Iterable[str]) -> str:
    """Sentences as a list below a note."""
    return "".join(f"\n- {prose(sentence)}" for sentence in sentences)


def _methods(figures: Sequence[Figure]) -> str:
    methods = sorted({figure.test for figure in figures if figure.test})
    return f" Intervals: {prose('; '.join(methods))}." if methods else ""
