"""Sections about the damage itself: which requests differ where, at which token, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvaudit.analysis.compare import EQUAL, Pair
from kvaudit.reports.html.answers import mark_of, policy_keys
from kvaudit.reports.html.charts import (
    MOST_BINS,
    Curve,
    bars,
    cumulative,
    curves,
    heat_map,
    requests_a_column,
)
from kvaudit.reports.html.parts import Key, Picture, Section, listed, short
from kvaudit.reports.words.numbers import counted, number

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

Floats = NDArray[np.float64]

CELL = "M-5-5H5V5H-5Z"
SMALLEST_MARGIN = 1e-3
"""Of a logarithmic axis: smaller margins, zero among them, are drawn here."""
MOST_NUMBERS = 30


def sections(audit: Audit) -> Iterator[Section]:
    yield _where(audit)
    yield Section(
        "kind",
        "What kind of damage is it?",
        pictures=(*_first_difference(audit), *_margins(audit)),
    )


def _where(audit: Audit) -> Section:
    pictures = [picture for policy in audit.grid.policies for picture in _heat_map(audit, policy)]
    size = requests_a_column(audit.requests)
    lead = ["A row is an order, a column a request in the order in which they came."]
    if size > 1:
        lead.append(
            f"{audit.requests:,} requests are more than fit side by side: a column stands for {size} successive "
            "requests. It is coloured as soon as one of them differs, and the stronger the more of them do."
        )
    return Section("where", "Which requests differ from full prefill?", tuple(lead), tuple(pictures))


def _heat_map(audit: Audit, policy: str) -> Iterator[Picture]:
    pairs = [*_references(audit, policy), *_references(audit, policy, "reset")]
    found = [pair for pair in pairs if pair.comparable.any()]
    if not found:
        return
    names = [audit.grid.arms[pair.right].order if _is_order(audit, pair) else "(reset)" for pair in found]
    counts = [
        f"{short(name)} {int(pair.differs.sum()):,} of {int(pair.comparable.sum()):,}"
        for name, pair in zip(names, found, strict=True)
    ]
    summary = f"{short(policy)}, requests that differ from full prefill: {listed(counts, MOST_NUMBERS)}."
    name = f"flips-{audit.grid.policies.index(policy)}"
    keys = [Key("differs from full prefill", "flip", CELL), Key("equal", "panel", CELL)]
    if requests_a_column(audit.requests) > 1:
        keys[:1] = [Key("all differ from full prefill", "flip", CELL), Key("some differ", "flip faint", CELL)]
    if not all(pair.comparable.all() for pair in found):
        keys.append(Key("not comparable", "unknown", CELL))
    yield Picture(
        name,
        short(policy),
        "A column with a mark in some rows only is a request whose answer depends on the order. One with marks in all "
        "rows differs from full prefill whatever was served before, but its answers may still change with the order.",
        summary,
        heat_map(name, names, np.array([pair.agreement for pair in found]), summary),
        tuple(keys),
    )


def _references(audit: Audit, policy: str, control: str = "none") -> list[Pair]:
    arms = audit.grid.find(policy, control)
    return [pair for pair in audit.pairs if pair.kind == "reference" and pair.right in arms]


def _is_order(audit: Audit, pair: Pair) -> bool:
    return audit.grid.arms[pair.right].control == "none"


def _column(audit: Audit, policy: str, name: str, *, differing: bool) -> Floats:
    """A numeric column over all orders of a policy, of the answers that differ from full prefill or equal it."""
    values = [
        audit.grid.column(name, pair.right)[pair.differs if differing else pair.agreement == EQUAL]
        for pair in _references(audit, policy)
    ]
    found: Floats = np.concatenate([*values, np.empty(0)])
    return np.asarray(found[np.isfinite(found)])


def _first_difference(audit: Audit) -> Iterator[Picture]:
    places = {policy: _column(audit, policy, "first_difference", differing=True) for policy in audit.grid.policies}
    places = {policy: values for policy, values in places.items() if len(values)}
    if not places:
        return
    last = int(max(values.max() for values in places.values()))
    width = math.ceil((last + 1) / MOST_BINS)
    edges = np.arange(0, last + width + 1, width)
    names = [str(start) if width == 1 else f"{start}-{start + width - 1}" for start in edges[:-1]]
    series = [(mark_of(audit, policy), np.histogram(values, edges)[0] * 1.0) for policy, values in places.items()]
    medians = [
        f"{short(policy)} {counted(len(values), 'answer')}, median token {number(float(np.median(values)), 0)}"
        for policy, values in places.items()
    ]
    summary = f"At which token answers leave full prefill's: {listed(medians, MOST_NUMBERS)}."
    yield Picture(
        "first-difference",
        "Where answers leave full prefill's",
        "How many answers, over all orders, first differ at this token of the answer (0 is the first). On the left: "
        "wrong from the start. On the right: right for a while.",
        summary,
        bars("first-difference", names, series, "token of the answer", summary),
        policy_keys(audit, places),
    )


def _margins(audit: Audit) -> Iterator[Picture]:
    differing = {policy: _column(audit, policy, "margin", differing=True) for policy in audit.grid.policies}
    differing = {policy: values for policy, values in differing.items() if len(values)}
    if not differing:
        return
    lines = []
    for policy, values in differing.items():
        mark = mark_of(audit, policy)
        lines.append(Curve(mark, *cumulative(np.maximum(values, SMALLEST_MARGIN))))
        equal = _column(audit, policy, "margin", differing=False)
        if len(equal):
            lines.append(Curve(mark, *cumulative(np.maximum(equal, SMALLEST_MARGIN)), dashed=True))
    medians = [f"{short(policy)} {number(float(np.median(values)))}" for policy, values in differing.items()]
    summary = (
        "Margin of the two best logits where an answer first differs from full prefill's, medians: "
        f"{listed(medians, MOST_NUMBERS)}."
    )
    yield Picture(
        "margins",
        "Near tie or damage",
        "Share of answers whose margin, the difference of the two best logits, is smaller than this. Solid: where an "
        "answer first differs. Dashed: the smallest margin of answers that stay equal. Differences at small margins "
        "are near ties that rounding could turn; at large margins the reused KV did damage.",
        summary,
        curves("margins", lines, ("margin of the two best logits", "answers, %"), summary, logarithmic=True),
        policy_keys(audit, differing),
    )
