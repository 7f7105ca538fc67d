"""Sections about answers: variation between orders, fidelity per order and per policy, the controls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvaudit.analysis.figures import Figure, select
from kvaudit.records import CHRONOLOGICAL, FULL_PREFILL, REVERSED
from kvaudit.reports.html.charts import Group, Point, forest
from kvaudit.reports.html.drawing import Mark, key, order_mark, policy_mark
from kvaudit.reports.html.parts import Key, Picture, Section, Table, listed, short, table
from kvaudit.reports.words.figures import CONTROL_METRICS, CONTROLS_NOTE, condition, controlled, place_condition
from kvaudit.reports.words.numbers import counted, interval, number, percent, small

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

MOST_NUMBERS = 30
"""Key numbers in a figure's accessible text."""
WHOLE = (0.0, 100.0)


def sections(audit: Audit) -> Iterator[Section]:
    fidelity = [figure for figure in select(audit.figures, "fidelity") if figure.control != "repeat"]
    measured = _measured(fidelity)
    yield Section(
        "answers",
        "Does the order change the answers?",
        pictures=(*_variation_picture(audit), *_order_picture(audit, measured), *_policy_picture(audit, measured)),
        tables=(*_variation_table(audit), *(_fidelity_table(audit, fidelity) if measured else ())),
    )


def controls(audit: Audit) -> Section:
    rows = [
        [CONTROL_METRICS[metric], controlled(figure), percent(figure.value), interval(figure), f"{figure.n or 0:,}"]
        for metric in CONTROL_METRICS
        for figure in _measured(select(audit.figures, metric))
    ]
    columns = ("control", "policy", "differ", "95 % interval", "requests")
    lead = ("A second run of the same order from an empty cache: it should reproduce every answer.",)
    found = table("Answers that a second run did not reproduce", columns, rows, (CONTROLS_NOTE,), labels=2)
    return Section("controls", "Controls", lead if found else (), tables=tuple(found))


def policy_keys(audit: Audit, shown: Iterable[str | None]) -> tuple[Key, ...]:
    """The legend of the policies that a picture shows."""
    shown = set(shown)
    return tuple(
        key(short(policy), policy_mark(index)) for index, policy in enumerate(audit.grid.policies) if policy in shown
    )


def mark_of(audit: Audit, policy: str | None) -> Mark:
    policies = audit.grid.policies
    return policy_mark(policies.index(policy) if policy in policies else len(policies))


def at(audit: Audit, metric: str, like: Figure) -> Figure | None:
    """The figure of another metric for the same policy, order and control."""
    return next(iter(select(audit.figures, metric, like.policy, like.order, like.control)), None)


def point(figure: Figure, mark: Mark, note: str = "") -> Point:
    """A share as a point on an axis in percent."""
    low, high = (None if bound is None else 100 * bound for bound in (figure.low, figure.high))
    return Point(mark, 100 * (figure.value or 0), low, high, note)


def numbers(figures: Sequence[Figure], name: Callable[[Figure], str]) -> str:
    """The key numbers of shares in one line."""
    return listed([f"{name(f)} {percent(f.value)} ({interval(f)})" for f in figures], MOST_NUMBERS)


def _variation_picture(audit: Audit) -> Iterator[Picture]:
    figures = _measured(select(audit.figures, "answer_variation"))
    if not figures:
        return
    summary = f"Answer variation with 95 % intervals: {numbers(figures, lambda f: short(f.policy))}."
    groups = [
        Group(figure.policy or "", [point(figure, mark_of(audit, figure.policy), percent(figure.value))])
        for figure in figures
    ]
    yield Picture(
        "variation",
        "A. Answer variation across request orders",
        "Order pairs in which a request got different answers, as a mean over requests. Further left is better; at 0 % "
        "the order never changed an answer. Lines are 95 % intervals.",
        summary,
        forest("variation", groups, "order pairs that differ, %", summary, WHOLE),
    )


def _order_picture(audit: Audit, fidelity: Sequence[Figure]) -> Iterator[Picture]:
    shown = [figure for figure in fidelity if figure.policy in audit.grid.policies]
    if not shown:
        return
    places = dict.fromkeys((figure.order, figure.control) for figure in sorted(shown, key=lambda f: f.control or ""))
    groups = []
    for place in places:
        there = [figure for figure in shown if (figure.order, figure.control) == place]
        label = "cache emptied before each request (reset)" if place[1] == "reset" else place_condition(*place)
        groups.append(Group(label, [point(figure, mark_of(audit, figure.policy)) for figure in there]))
    summary = (
        "Fidelity to full prefill in each request order, with 95 % intervals: "
        f"{numbers(shown, lambda f: f'{short(f.policy)}, {condition(f)}')}."
    )
    yield Picture(
        "orders",
        "B. Fidelity to full prefill in each order",
        "Answers equal to full prefill's, token for token. Further right is better. A policy whose points move from "
        "order to order depends on what was served before; the reset row shows it without history.",
        summary,
        forest("orders", groups, "answers equal to full prefill's, %", summary, WHOLE),
        policy_keys(audit, [figure.policy for figure in shown]),
    )


def _policy_picture(audit: Audit, fidelity: Sequence[Figure]) -> Iterator[Picture]:
    orders = list(dict.fromkeys(arm.order for arm in audit.arms if arm.order != REVERSED))
    figures = [figure for figure in fidelity if figure.control == "none" and figure.order in orders]
    by_policy = {
        policy: [figure for figure in figures if figure.policy == policy]
        for policy in dict.fromkeys(figure.policy for figure in figures)
    }
    if not by_policy or {figure.order for figure in figures} == {CHRONOLOGICAL}:
        return
    marks = {order: order_mark(index) for index, order in enumerate(orders)}
    groups = [
        Group(policy or "", [point(figure, marks[figure.order or ""], percent(figure.value)) for figure in mine])
        for policy, mine in by_policy.items()
    ]
    summary = (
        "Fidelity of every policy in chronological and shuffled orders, with 95 % Wilson intervals: "
        f"{numbers(figures, lambda f: f'{short(f.policy)}, {condition(f)}')}."
    )
    yield Picture(
        "policies",
        "C. Every policy in chronological and shuffled orders",
        "The filled mark is the order in which the requests really came; hollow marks are shuffles of it. A policy "
        "whose marks lie apart depends on the order; one whose marks lie together may still answer other requests "
        "rightly in each. Lines are Wilson 95 % intervals.",
        summary,
        forest("policies", groups, "answers equal to full prefill's, %", summary, WHOLE),
        tuple(key(short(order), mark) for order, mark in marks.items() if order in {f.order for f in figures}),
    )


def _variation_table(audit: Audit) -> list[Table]:
    rows, methods = [], set()
    for figure in _measured(select(audit.figures, "answer_variation")):
        flipped, visible_from, kappa = (
            at(audit, metric, figure) for metric in ("flipped_requests", "smallest_variation", "fleiss_kappa")
        )
        rows.append(
            [
                short(figure.policy),
                percent(figure.value),
                interval(figure),
                percent(flipped.value if flipped else None),
                percent(visible_from.value if visible_from else None),
                number(kappa.value if kappa else None),
            ]
        )
        methods |= {figure.test} if figure.test else set()
    columns = ["policy", "variation", "95 % interval", "requests that vary", "visible from", "Fleiss' kappa"]
    if not select(audit.figures, "fleiss_kappa"):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    notes = [
        "Visible from: the smallest share of affected requests that would have shown with 95 % probability.",
        *(["Fleiss' kappa: agreement of the orders beyond chance, 1 where all agree."] if len(columns) > 5 else []),
        *_methods(methods),
    ]
    return table("Answer variation", columns, rows, notes)


def _fidelity_table(audit: Audit, fidelity: Sequence[Figure]) -> list[Table]:
    rows, methods = [], set()
    for figure in fidelity:
        kl, right, edits = (at(audit, metric, figure) for metric in ("kl_mean", "accuracy", "edit_distance"))
        rows.append(
            [
                short(figure.policy),
                condition(figure),
                percent(figure.value),
                interval(figure),
                f"{figure.n or 0:,}",
                small(kl.value if kl else None),
                percent(right.value if right else None),
                number(edits.value if edits else None, 1),
            ]
        )
        methods |= {figure.test} if figure.test else set()
    columns = ("policy", "order", "equal", "95 % interval", "requests", "KL", "right", "edits")
    notes = [
        "KL: mean divergence from full prefill, nats a token. Right: answers equal to the trace's expected one. Edits: "
        "mean edit distance of the answers that differ. Controls are in brackets.",
        *_methods(methods),
        *_full_prefill(audit),
    ]
    return table("Fidelity to full prefill", columns, rows, notes, labels=2)


def _measured(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.value is not None]


def _methods(methods: set[str]) -> list[str]:
    return [f"Intervals: {'; '.join(sorted(methods))}."] if methods else []


def _full_prefill(audit: Audit) -> list[str]:
    right = [
        f"Full prefill itself is right on {percent(figure.value)} of {counted(figure.n, 'request')} "
        f"({interval(figure)} %)."
        for figure in select(audit.figures, "accuracy", FULL_PREFILL, control="none")
    ]
    empty = [
        f"Full prefill itself gave an empty answer to {round(figure.value * figure.n):,} of "
        f"{counted(figure.n, 'request')}."
        for figure in select(audit.figures, "empty_answers")
        if figure.value and figure.n
    ]
    return right + empty
