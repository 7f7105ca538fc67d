"""Sections about differences on the same requests: policies, orders, history against own error, and their power."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvaudit.analysis.figures import POINTS, Figure, select
from kvaudit.analysis.stats import ALPHA
from kvaudit.reports.html.answers import point
from kvaudit.reports.html.charts import Group, forest
from kvaudit.reports.html.drawing import key, order_mark
from kvaudit.reports.html.parts import Picture, Section, Table, listed, short, table
from kvaudit.reports.words.figures import POWER_NOTE, cochran_sentence, condition, power_rows, tested
from kvaudit.reports.words.findings import OWN_ERROR
from kvaudit.reports.words.numbers import counted, interval, p_value, points

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

MOST_NUMBERS = 30


def sections(audit: Audit) -> Iterator[Section]:
    yield Section(
        "differences",
        "Policy against policy, on the same requests",
        tables=(*_policies(audit), *_variations(audit), *_power(audit)),
        notes=tuple(cochran_sentence(figure) for figure in select(audit.figures, "cochran_policies")),
    )
    yield Section(
        "between-orders",
        "Order against order, for one policy",
        tables=tuple(_orders(audit)),
        notes=tuple(cochran_sentence(figure) for figure in select(audit.figures, "cochran_orders")),
    )
    yield _history(audit)


def contrast(figure: Figure) -> list[str]:
    """The cells of a paired difference: points, interval, discordant requests, p-values."""
    discordant = " : ".join(f"{count:,}" for count in figure.discordant or ())
    return [
        points(figure.value),
        interval(figure),
        discordant or "-",
        p_value(figure.p_value),
        p_value(figure.p_adjusted),
    ]


def _policies(audit: Audit) -> list[Table]:
    figures = [figure for figure in select(audit.figures, "fidelity_difference") if figure.value is not None]
    rows = [[short(figure.policy), condition(figure), *contrast(figure)] for figure in figures]
    columns = ("first - second policy", "order", "points", "95 % interval", "first : second", "p", "p (Holm)")
    notes = [
        "Points: fidelity of the first less that of the second. First : second: requests on which only the first, and "
        f"only the second, equals full prefill. {tested(figures)}"
    ]
    return table("Differences of fidelity", columns, rows, notes, labels=2)


def _variations(audit: Audit) -> list[Table]:
    figures = [figure for figure in select(audit.figures, "variation_difference") if figure.value is not None]
    rows = [[short(figure.policy), points(figure.value), interval(figure), f"{figure.n or 0:,}"] for figure in figures]
    columns = ("first - second policy", "points", "95 % interval", "requests")
    notes = ["Points: answer variation of the first less that of the second; below zero the first varies less."]
    return table("Differences of answer variation", columns, rows, notes)


def _power(audit: Audit) -> list[Table]:
    rows = [[short(row.policies), short(row.weakest), row.smallest, *row.needed] for row in power_rows(audit.figures)]
    columns = ("policies", "weakest in", "smallest difference", *(counted(size, "point") for size in POINTS))
    notes = [
        f"Smallest difference: {POWER_NOTE}. The other columns: how many requests would show a difference of so many "
        "points in the order with the most discordant requests."
    ]
    return table("Power: what this audit could have seen", columns, rows, notes, labels=2)


def _orders(audit: Audit) -> list[Table]:
    rows = []
    all_figures = [figure for figure in select(audit.figures, "order_difference") if figure.value is not None]
    for policy in dict.fromkeys(figure.policy for figure in all_figures):
        figures = [figure for figure in all_figures if figure.policy == policy]
        significant = sum(figure.p_adjusted is not None and figure.p_adjusted < ALPHA for figure in figures)
        widest = max(figures, key=lambda figure: abs(figure.value or 0))
        rows.append([short(policy), short(widest.order), *contrast(widest), f"{significant} of {len(figures)}"])
    columns = (
        "policy",
        "widest: first - second order",
        "points",
        "95 % interval",
        "first : second",
        "p",
        "p (Holm)",
        "pairs that differ",
    )
    notes = [
        f"Pairs that differ: pairs of orders whose fidelity differs (Holm p < {ALPHA}). The row is the pair with the "
        f"widest difference. {tested(all_figures)}"
    ]
    return table("Differences of fidelity between orders", columns, rows, notes, labels=2)


def _history(audit: Audit) -> Section:
    losses = [figure for figure in select(audit.figures, "history_loss") if figure.value is not None]
    rows = []
    for figure in losses:
        own = next(iter(select(audit.figures, "fidelity", figure.policy, control="reset")), None)
        lost = "-" if own is None or own.value is None else f"{100 * (1 - own.value):.1f}"
        rows.append([short(figure.policy), short(figure.order), lost, *contrast(figure)])
    columns = ("policy", "order", "own", "history", "95 % interval", "reset : order", "p", "p (Holm)")
    notes = [
        f"In points. Own: {OWN_ERROR}, what is lost with the cache emptied before each request (reset control). "
        f"History: what the order loses beyond it. {tested(losses)}"
    ]
    return Section(
        "history",
        "Where the loss comes from: history or own error",
        pictures=tuple(_history_picture(audit, losses)),
        tables=tuple(table("Fidelity lost to history", columns, rows, notes, labels=2)),
    )


def _history_picture(audit: Audit, losses: list[Figure]) -> Iterator[Picture]:
    if not losses:
        return
    orders = list(dict.fromkeys(figure.order or "" for figure in losses))
    marks = {order: order_mark(index) for index, order in enumerate(orders)}
    groups = []
    for policy in dict.fromkeys(figure.policy for figure in losses):
        mine = [figure for figure in losses if figure.policy == policy]
        rows = [point(figure, marks[figure.order or ""], points(figure.value)) for figure in mine]
        groups.append(Group(policy or "", rows))
    numbers = [f"{short(f.policy)}, {short(f.order)} {points(f.value)} ({interval(f)})" for f in losses]
    summary = f"Points of fidelity lost to history, with 95 % intervals: {listed(numbers, MOST_NUMBERS)}."
    yield Picture(
        "history-loss",
        "Fidelity lost to history",
        "How many more requests equal full prefill when the cache is emptied before each, in points. At the line: no "
        "loss to history. An interval that stays right of it: history did damage.",
        summary,
        forest("history-loss", groups, "points of fidelity lost to history", summary, None),
        tuple(key(short(order), mark) for order, mark in marks.items()),
    )
