"""Sections about answers: fidelity, variation, policies and orders against each other, controls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from kvaudit.analysis.figures import POINTS, Figure, requests_metric, select
from kvaudit.records import FULL_PREFILL
from kvaudit.reports.terminal.layout import condition, figure_at, grouped_table, heading, place_of, sentences, table
from kvaudit.reports.words.figures import (
    CONTROL_METRICS,
    POWER_NOTE,
    cochran_sentence,
    controlled,
    power_rows,
    tested,
)
from kvaudit.reports.words.findings import OWN_ERROR
from kvaudit.reports.words.numbers import counted, interval, number, p_value, percent, points, small

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


def parts(audit: Audit) -> Iterator[RenderableType]:
    yield from _fidelity(audit)
    yield from _variation(audit)
    yield from _policy_differences(audit)
    yield from _power(audit)
    yield from _order_differences(audit)
    yield from _history_and_own_error(audit)
    yield from _controls(audit)


def _fidelity(audit: Audit) -> Iterator[RenderableType]:
    rows, methods = [], set()
    for figure in select(audit.figures, "fidelity"):
        if figure.control == "repeat":
            continue
        kl = figure_at(audit, "kl_mean", place_of(figure))
        accuracy = figure_at(audit, "accuracy", place_of(figure))
        edits = figure_at(audit, "edit_distance", place_of(figure))
        rows.append(
            [
                figure.policy or "",
                condition(place_of(figure)),
                percent(figure.value),
                interval(figure),
                small(kl.value if kl else None),
                percent(accuracy.value if accuracy else None),
                number(edits.value if edits else None, 1),
            ]
        )
        methods |= {figure.test} if figure.test else set()
    if not rows:
        return
    yield from heading("Fidelity: answers equal to full prefill's, token for token")
    yield grouped_table(("policy, order", "equal", "95 % interval", "KL", "right", "edits"), rows)
    yield from sentences(
        [
            "KL: mean divergence from full prefill in nats a token. right: answers equal to the trace's expected one. "
            "edits: mean edit distance of the answers that differ.",
            *([f"Intervals: {'; '.join(sorted(methods))}."] if methods else []),
            *_full_prefill_accuracy(audit),
            *_full_prefill_empty(audit),
        ]
    )


def _full_prefill_accuracy(audit: Audit) -> list[str]:
    found = select(audit.figures, "accuracy", FULL_PREFILL, control="none")
    return [
        f"Full prefill itself is right on {percent(figure.value)} of {counted(figure.n, 'request')} "
        f"({interval(figure)} %)."
        for figure in found
    ]


def _full_prefill_empty(audit: Audit) -> list[str]:
    return [
        f"Full prefill itself gave an empty answer to {round(figure.value * figure.n):,} of "
        f"{counted(figure.n, 'request')}."
        for figure in select(audit.figures, "empty_answers")
        if figure.value and figure.n
    ]


def _variation(audit: Audit) -> Iterator[RenderableType]:
    rows, methods = [], set()
    for figure in select(audit.figures, "answer_variation"):
        flipped = select(audit.figures, "flipped_requests", figure.policy)[0]
        visible_from = select(audit.figures, "smallest_variation", figure.policy)[0]
        kappa = select(audit.figures, "fleiss_kappa", figure.policy)[0]
        rows.append(
            [
                figure.policy or "",
                percent(figure.value),
                interval(figure),
                number(kappa.value),
                percent(flipped.value),
                percent(visible_from.value),
            ]
        )
        methods |= {figure.test} if figure.test else set()
    if not rows:
        return
    differences = [
        [figure.policy or "", points(figure.value), interval(figure), "", "", ""]
        for figure in select(audit.figures, "variation_difference")
        if figure.value is not None
    ]
    yield from heading("Answer variation: order pairs with different answers, mean over requests")
    yield table(("policy", "variation", "95 % interval", "kappa", "requests", "visible from"), rows + differences)
    yield from sentences(
        [
            "kappa: Fleiss' kappa of the orders, their agreement beyond chance, 1 where all agree. requests: share "
            "that vary. visible from: the smallest share of affected requests that would have shown with 95 % "
            "probability. Rows of two policies: the first less the second, in points.",
            *([f"Intervals: {'; '.join(sorted(methods))}."] if methods else []),
        ]
    )


def _policy_differences(audit: Audit) -> Iterator[RenderableType]:
    figures = [figure for figure in select(audit.figures, "fidelity_difference") if figure.value is not None]
    if not figures:
        return
    yield from heading("Policy against policy: fidelity on the same requests, in points")
    rows = [[figure.policy or "", condition(place_of(figure)), *_contrast(figure)] for figure in figures]
    yield grouped_table(("1st - 2nd policy, order", "points", "95 % interval", "1st:2nd", "p", "p (Holm)"), rows)
    yield from sentences(
        [f"1st:2nd: requests on which only the first, and only the second, equals full prefill. {tested(figures)}"]
    )
    yield from sentences([cochran_sentence(figure) for figure in select(audit.figures, "cochran_policies")])


def _power(audit: Audit) -> Iterator[RenderableType]:
    rows = [[row.policies, row.smallest, *row.needed] for row in power_rows(audit.figures)]
    if not rows:
        return
    methods = {figure.test or "" for figure in select(audit.figures, requests_metric(POINTS[0]))}
    yield from heading("Power: what this audit could have seen")
    yield table(("1st - 2nd policy", "points", *(f"n for {size}" for size in POINTS)), rows)
    yield from sentences(
        [
            f"points: {POWER_NOTE}. n for: requests that would show so many points.",
            *(f"Requests: {method}." for method in sorted(methods)),
        ]
    )


def _order_differences(audit: Audit) -> Iterator[RenderableType]:
    lines = []
    for policy in dict.fromkeys(figure.policy for figure in select(audit.figures, "order_difference")):
        figures = [f for f in select(audit.figures, "order_difference", policy) if f.value is not None]
        if not figures:
            continue
        significant = sum(figure.p_adjusted is not None and figure.p_adjusted < 0.05 for figure in figures)
        widest = max(figures, key=lambda figure: abs(figure.value or 0))
        lines.append(
            f"{policy}: {significant} of {counted(len(figures), 'pair')} of orders differ (Holm p < 0.05); widest "
            f"{widest.order}, {points(widest.value)} points ({interval(widest)}), p {p_value(widest.p_value)}, Holm "
            f"{p_value(widest.p_adjusted)}. {tested(select(audit.figures, 'order_difference'))}"
        )
        lines += [cochran_sentence(figure) for figure in select(audit.figures, "cochran_orders", policy)]
    if lines:
        yield from heading("Order against order: fidelity of one policy")
        yield from sentences(lines)


def _history_and_own_error(audit: Audit) -> Iterator[RenderableType]:
    rows, losses = [], []
    for figure in select(audit.figures, "history_loss"):
        reset = next(iter(select(audit.figures, "fidelity", figure.policy, control="reset")), None)
        if figure.value is None or reset is None or reset.value is None:
            continue
        own_error = number(100 * (1 - reset.value), 1)
        rows.append([figure.policy or "", figure.order or "", own_error, *_contrast(figure)])
        losses.append(figure)
    if not rows:
        return
    yield from heading("Where the loss comes from: history or own error, in points")
    yield grouped_table(("policy, order", "own", "history", "95 % interval", "1st:2nd", "p", "p (Holm)"), rows)
    yield from sentences(
        [
            f"own: {OWN_ERROR}, what is lost with the cache emptied before each request (reset control). history: what "
            f"the order loses beyond it, 1st = reset, 2nd = order. {tested(losses)}"
        ]
    )


def _controls(audit: Audit) -> Iterator[RenderableType]:
    rows = [
        [CONTROL_METRICS[metric], controlled(figure), *_disagreement(figure)]
        for metric in CONTROL_METRICS
        for figure in select(audit.figures, metric)
    ]
    if rows:
        yield from heading("Controls: a second run of the same order from an empty cache")
        yield grouped_table(("control, policy", "differ", "95 % interval", "requests"), rows)


def _disagreement(figure: Figure) -> list[str]:
    return [percent(figure.value), interval(figure), f"{figure.n or 0:,}"]


def _contrast(figure: Figure) -> list[str]:
    discordant = ":".join(str(count) for count in figure.discordant or ())
    p = p_value(figure.p_value)
    return [points(figure.value), interval(figure), discordant, p, p_value(figure.p_adjusted)]
