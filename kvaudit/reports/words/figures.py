"""Tests and power of the figures, as sentences and rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvaudit.analysis.figures import POINTS, Figure, requests_metric, select
from kvaudit.reports.escape import visible
from kvaudit.reports.words.numbers import counted, number, p_value


def tested(figures: Sequence[Figure]) -> str:
    """The test behind a family of contrasts, how it counted requests, and the family."""
    test = " or ".join(dict.fromkeys(figure.p_test for figure in figures if figure.p_test))
    return f"{test[:1].upper()}{test[1:]}; Holm over {counted(len(figures), 'comparison')}."


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
    """A figure's order, or its control in brackets; of the rounding control both."""
    return place_condition(figure.order, figure.control)


def place_condition(order: str | None, control: str | None) -> str:
    run = visible(order or "")
    return {"none": run, "rounding": f"{run} (rounding)"}.get(control or "", f"({visible(control or '')})")


CONTROL_METRICS = {
    "noise_floor": "noise floor",
    "repeat_disagreement": "repeat",
    "rounding_disagreement": "rounding",
    "rounding_selections": "selections decided by rounding",
}
"""What the controls show, in the order of the reports."""
CONTROLS_NOTE = (
    "Noise floor: full prefill against full prefill. Repeat: an order of a policy against itself. "
    "Rounding: an order against itself with the signals that rank tokens moved by less than their rounding. Where any "
    "of them differs, not every difference between orders is history."
)


def controlled(figure: Figure) -> str:
    """What a control was of: a policy, and in which order."""
    policy = visible(figure.policy or "")
    return policy if figure.metric == "noise_floor" else f"{policy}, {condition(replace(figure, control='none'))}"


def cochran_sentence(figure: Figure) -> str:
    where = f", {condition(figure)}" if figure.order else ", all orders"
    place = f"{visible(figure.policy or 'all policies')}{where}"
    if figure.p_value is None:
        return f"{place}: every request is answered alike, so there is nothing for Cochran's Q to test."
    return (
        f"{place}: Cochran's Q {number(figure.value)}, p {p_value(figure.p_value)}, {p_value(figure.p_adjusted)} by "
        f"Holm over {figure.family:,}."
    )


def equality_sentences(figures: Sequence[Figure]) -> list[str]:
    """Whether the policies recomputed the same number of tokens in each order; nothing where that is not known."""
    known = select(figures, "recomputed_equal")
    unequal = [condition(figure) for figure in known if not figure.value]
    if unequal:
        return [f"The policies did not recompute the same number of tokens in: {', '.join(unequal)}."]
    return ["All policies with a partial budget recomputed the same number of tokens in each order."] if known else []
