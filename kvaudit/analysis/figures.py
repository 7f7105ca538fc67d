"""What an audit's answers come to: comparisons to figures, each a row of the `summary` table (DESIGN 3, Measures).

What each figure is, and its interval: `kvaudit.schema.metrics`. The Holm family of an adjusted p-value is every row of
its metric. Where windows overlap, bootstraps resample blocks of the stream, and intervals, tests and power count as
many requests as there are blocks (`stats.block_length`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvaudit.analysis import power, stats
from kvaudit.analysis.compare import NO_ROW, NOT_COMPARABLE, Grid, Kind, Pair
from kvaudit.analysis.reproduction import chance_of_reproducing, decided_by_rounding
from kvaudit.analysis.stats import Estimate, Flags, Floats, Integers
from kvaudit.records import FULL_PREFILL
from kvaudit.schema import TABLES

CONTENT_KINDS = ("document", "message", "tool-result")
POINTS = (1, 2, 3, 5)
"""Differences of fidelity, in percent of requests, for which an audit says how many requests would show them."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the summary. `discordant`: on how many requests only the first, and only the second, was right.

    `test` is a text for people: how the interval was made, the test behind the p-value, and its Holm family. Of these,
    `p_test` is the test alone and `family` the number of p-values that were adjusted together.
    """

    metric: str
    policy: str | None = None
    order: str | None = None
    control: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    test: str | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    p_test: str | None = None
    family: int | None = None
    discordant: tuple[int, int] | None = None


class Contrast(NamedTuple):
    """Two conditions on the same requests; int8 [R] each, 1 right, 0 wrong, -1 not comparable."""

    figure: Figure
    first: np.ndarray[tuple[int], np.dtype[np.int8]]
    second: np.ndarray[tuple[int], np.dtype[np.int8]]


def answer_figures(grid: Grid, pairs: Sequence[Pair], overlap: int, seed: int) -> tuple[Figure, ...]:
    """Every figure about answers. `overlap` is the stream's (`stream_overlap`), `seed` seeds the bootstrap."""
    block = stats.block_length(overlap, len(grid.request_ids))
    reference = {pair.right: pair for pair in pairs if pair.kind == "reference"}
    policy_differences = contrasted(list(_policy_contrasts(grid, reference)), block)
    return (
        *_fidelity(grid, reference, block),
        *_accuracy(grid, block),
        *_empty(grid, block),
        *_variation(grid, pairs, block, seed),
        *_kappa(grid),
        *_reproduction(grid, pairs, block),
        *policy_differences,
        *_power(policy_differences, overlap, block),
        *_adjusted(_cochran_policies(grid, reference, block)),
        *contrasted(list(_order_contrasts(grid, reference)), block),
        *_adjusted(_cochran_orders(grid, reference, block)),
        *contrasted(list(_history_contrasts(grid, reference)), block),
    )


def summary_table(figures: Sequence[Figure]) -> pa.Table:
    """The `summary` table."""
    rows = []
    for figure in figures:
        left, right = figure.discordant or (None, None)
        rows.append({**asdict(figure), "discordant_left": left, "discordant_right": right})
    return pa.Table.from_pylist(rows, TABLES["summary"])


def select(
    figures: Iterable[Figure],
    metric: str,
    policy: str | None = None,
    order: str | None = None,
    control: str | None = None,
) -> list[Figure]:
    """The figures of a metric, in order; None matches anything."""
    return [
        figure
        for figure in figures
        if figure.metric == metric
        and policy in (None, figure.policy)
        and order in (None, figure.order)
        and control in (None, figure.control)
    ]


def stream_overlap(requests: pa.Table) -> int:
    """How many requests share content: the median over documents, messages and tool results of the requests that hold
    one. A rolling window of w documents gives w, however many streams interleave.
    """
    contents, holders, seen = [], [], 0
    for segments in requests["segments"].chunks:
        parts = pc.list_flatten(segments)
        kept = pc.is_in(parts.field("kind"), value_set=pa.array(CONTENT_KINDS))
        contents.append(parts.field("content_id").filter(kept))
        holders.append(seen + pc.list_parent_indices(segments).to_numpy()[kept.to_numpy(zero_copy_only=False)])
        seen += len(segments)
    encoded = pa.chunked_array(contents, pa.string()).dictionary_encode()
    if len(encoded) == 0:
        return 1
    content = np.concatenate([chunk.indices.to_numpy() for chunk in encoded.chunks]).astype(np.int64)
    held = np.unique(content * len(requests) + np.concatenate(holders))
    return int(np.median(np.bincount(held // len(requests))))


def variation_by_request(grid: Grid, pairs: Sequence[Pair], policy: str) -> Floats:
    """Per request the share of comparable order pairs with different answers: float64 [R], NaN where none compares."""
    mine = [pair for pair in pairs if pair.kind == "orders" and pair.policy == policy]
    differing, comparable = np.zeros((2, len(grid.request_ids)))
    for pair in mine:
        differing += pair.differs
        comparable += pair.comparable
    return np.where(comparable > 0, differing / np.maximum(comparable, 1), np.nan)


def answer_codes(grid: Grid, arms: Sequence[int]) -> Integers:
    """Equal codes for equal answers, over the requests that all of these arms answered: int64 [requests, arms].

    Equal as `compare.agreement` says, where all of these answers have token ids or none has, and likewise texts. Else
    only what all of them have is compared; no requests are left where that is nothing.
    """
    rows: Integers = grid.rows[list(arms)].T
    rows = rows[(rows != NO_ROW).all(axis=1)]
    rows = rows[~grid.failed[rows].any(axis=1)]
    known = [codes[rows] for codes in (grid.id_codes, grid.text_codes) if (codes[rows] >= 0).all()]
    if not known or not rows.size:
        return rows[:0]
    first, *rest = known
    return first if not rest else first * (rest[0].max() + 1) + rest[0]


def empty_answers(grid: Grid, arm: int) -> tuple[int, int]:
    """How many of an arm's answers are empty, and how many there are."""
    rows = grid.rows[arm]
    rows = rows[rows != NO_ROW]
    return int(grid.empty[rows].sum()), int((~grid.failed[rows]).sum())


def estimated(figure: Figure, estimate: Estimate | None) -> Figure:
    if estimate is None:
        return replace(figure, n=0)
    return replace(
        figure, value=estimate.value, low=estimate.low, high=estimate.high, n=estimate.n, test=estimate.method
    )


def _arm_figure(grid: Grid, metric: str, arm: int) -> Figure:
    planned = grid.arms[arm]
    return Figure(metric, planned.policy, planned.order, planned.control)


def _fidelity(grid: Grid, reference: dict[int, Pair], block: int) -> Iterator[Figure]:
    for arm, pair in reference.items():
        right, n = int((pair.agreement == 1).sum()), int(pair.comparable.sum())
        yield estimated(_arm_figure(grid, "fidelity", arm), stats.wilson(right, n, block))
    for arm, pair in reference.items():
        distances = pair.distance[pair.differs & (pair.distance >= 0)]
        mean = float(distances.mean()) if len(distances) else None
        yield replace(_arm_figure(grid, "edit_distance", arm), value=mean, n=len(distances))


def _accuracy(grid: Grid, block: int) -> Iterator[Figure]:
    expected = pc.utf8_trim_whitespace(grid.expected.cast(pa.large_string()))
    if expected.null_count == len(expected):
        return
    answers = pc.utf8_trim_whitespace(grid.texts)
    for arm, rows in enumerate(grid.rows):
        codes = np.where(rows == NO_ROW, -1, grid.text_codes[rows])
        codes[(rows != NO_ROW) & grid.failed[rows]] = -1
        right = pc.equal(answers.take(pa.array(codes, mask=codes < 0)), expected)
        judged = len(right) - right.null_count
        if judged:
            share = stats.wilson(cast(int, pc.sum(right).as_py()), judged, block)
            yield estimated(_arm_figure(grid, "accuracy", arm), share)


def _empty(grid: Grid, block: int) -> Iterator[Figure]:
    if grid.reference is not None:
        empty, answered = empty_answers(grid, grid.reference)
        yield estimated(_arm_figure(grid, "empty_answers", grid.reference), stats.wilson(empty, answered, block))


def _variation(grid: Grid, pairs: Sequence[Pair], block: int, seed: int) -> Iterator[Figure]:
    policies = grid.policies
    shares = np.empty((len(policies), len(grid.request_ids)))
    for row, policy in enumerate(policies):
        shares[row] = variation_by_request(grid, pairs, policy)
    for policy, share, estimate in zip(
        policies, shares, stats.mean_intervals(shares, block, (0.0, 1.0), seed), strict=True
    ):
        n = int((~np.isnan(share)).sum())
        yield estimated(Figure("answer_variation", policy, control="none"), estimate)
        flipped = stats.wilson(int((share > 0).sum()), n, block)
        yield estimated(Figure("flipped_requests", policy, control="none"), flipped)
        visible = stats.smallest_visible(stats.independent(n, block))
        yield Figure("smallest_variation", policy, control="none", value=visible, n=n)
    couples = list(combinations(range(len(policies)), 2))
    differences = np.array([shares[a] - shares[b] for a, b in couples]).reshape(len(couples), shares.shape[1])
    for (a, b), estimate in zip(couples, stats.mean_intervals(differences, block, (-1.0, 1.0), seed), strict=True):
        name = f"{policies[a]} - {policies[b]}"
        yield estimated(Figure("variation_difference", name, control="none"), estimate)


def _kappa(grid: Grid) -> Iterator[Figure]:
    for policy in grid.policies:
        codes = answer_codes(grid, grid.find(policy))
        test = f"Fleiss' kappa, {codes.shape[1]} orders"
        kappa = stats.fleiss_kappa(codes)
        yield Figure("fleiss_kappa", policy, control="none", value=kappa, n=len(codes), test=test)


def _power(differences: Sequence[Figure], overlap: int, block: int) -> Iterator[Figure]:
    """What the comparisons of policies could have seen, and the requests that would show POINTS."""
    test = f"exact McNemar, power {100 * power.POWER:.0f} %"
    most: dict[str | None, tuple[float, Figure]] = {}
    for figure in differences:
        if not figure.n:
            continue
        discordance = sum(figure.discordant or ()) / figure.n
        place = Figure("smallest_difference", figure.policy, figure.order, figure.control, n=figure.n)
        smallest = power.smallest_difference(figure.n, discordance, block)
        yield replace(place, value=smallest, test=f"{test}{stats.in_blocks(block)}")
        if figure.control == "none" and discordance > most.get(figure.policy, (-1.0, place))[0]:
            most[figure.policy] = discordance, place
    for discordance, place in most.values():
        for points in POINTS:
            needed = cast(int, power.requests_needed(points / 100, discordance, overlap))
            metric, test_then = requests_metric(points), f"{test}{stats.in_blocks(overlap)}"
            yield replace(place, metric=metric, value=float(needed), test=test_then)


def requests_metric(points: int) -> str:
    """The metric that says how many requests would show a difference of so many points."""
    return f"requests_for_{points}_point{'s' if points > 1 else ''}"


def _reproduction(grid: Grid, pairs: Sequence[Pair], block: int) -> Iterator[Figure]:
    metrics: dict[Kind, str] = {
        "noise": "noise_floor",
        "repeat": "repeat_disagreement",
        "rounding": "rounding_disagreement",
    }
    for kind, metric in metrics.items():
        for pair in pairs:
            if pair.kind == kind:
                figure = Figure(metric, pair.policy, grid.arms[pair.left].order, grid.arms[pair.right].control)
                yield estimated(figure, stats.wilson(int(pair.differs.sum()), int(pair.comparable.sum()), block))
    for policy in grid.policies:
        for arm in grid.find(policy):
            decided, requests = decided_by_rounding(grid, arm)
            if not requests:
                continue
            figure = Figure("rounding_selections", policy, grid.arms[arm].order, "none")
            yield estimated(figure, stats.wilson(decided, requests, block))
        chance = chance_of_reproducing(grid, policy)
        if chance is not None:
            yield Figure(
                "chance_of_reproducing", policy, test="randomisation of runs, request by request", p_value=chance
            )


def _policy_contrasts(grid: Grid, reference: dict[int, Pair]) -> Iterator[Contrast]:
    for order, control in _conditions(grid):
        arms = [arm for policy in grid.policies for arm in grid.find(policy, control, order) if arm in reference]
        for a, b in combinations(arms, 2):
            name = f"{grid.arms[a].policy} - {grid.arms[b].policy}"
            figure = Figure("fidelity_difference", name, order, control)
            yield Contrast(figure, reference[a].agreement, reference[b].agreement)


def _order_contrasts(grid: Grid, reference: dict[int, Pair]) -> Iterator[Contrast]:
    for policy in grid.policies:
        arms = [arm for arm in grid.find(policy) if arm in reference]
        for a, b in combinations(arms, 2):
            name = f"{grid.arms[a].order} - {grid.arms[b].order}"
            figure = Figure("order_difference", policy, name, "none")
            yield Contrast(figure, reference[a].agreement, reference[b].agreement)


def _history_contrasts(grid: Grid, reference: dict[int, Pair]) -> Iterator[Contrast]:
    """None where the reset control reuses nothing: it is full prefill then, and tells no error of the policy."""
    for policy in grid.policies:
        for reset in grid.find(policy, "reset")[:1]:
            if grid.reuses_nothing(reset):
                continue
            for arm in grid.find(policy):
                if arm in reference and reset in reference:
                    figure = Figure("history_loss", policy, grid.arms[arm].order, "none")
                    yield Contrast(figure, reference[reset].agreement, reference[arm].agreement)


def _conditions(grid: Grid) -> list[tuple[str, str]]:
    """The (order, control) pairs in which policies meet: the orders, then the reset control."""
    found = dict.fromkeys((arm.order, arm.control) for arm in grid.arms if arm.policy != FULL_PREFILL)
    return sorted((pair for pair in found if pair[1] in ("none", "reset")), key=lambda pair: pair[1] == "reset")


def contrasted(contrasts: Sequence[Contrast], block: int) -> list[Figure]:
    """Each contrast with its difference, interval, exact McNemar p-value and Holm's adjustment over all of them."""
    figures = []
    for figure, first, second in contrasts:
        compared = (first != NOT_COMPARABLE) & (second != NOT_COMPARABLE)
        discordant = int((first[compared] > second[compared]).sum()), int((first[compared] < second[compared]).sum())
        estimate = stats.paired_difference(*discordant, int(compared.sum()), block)
        made = estimated(figure, estimate)
        if estimate is not None:
            p = stats.mcnemar_p(*discordant, stats.independent(estimate.n, block) / estimate.n)
            p_test = f"exact McNemar{stats.in_blocks(block)}"
            made = replace(made, test=f"{p_test}; {estimate.method}", p_value=p, p_test=p_test, discordant=discordant)
        figures.append(made)
    return _adjusted(figures)


def _cochran_policies(grid: Grid, reference: dict[int, Pair], block: int) -> Iterator[Figure]:
    for order, control in _conditions(grid):
        arms = [arm for policy in grid.policies for arm in grid.find(policy, control, order)]
        yield from _cochran(Figure("cochran_policies", None, order, control), arms, reference, block)


def _cochran_orders(grid: Grid, reference: dict[int, Pair], block: int) -> Iterator[Figure]:
    for policy in grid.policies:
        yield from _cochran(Figure("cochran_orders", policy, None, "none"), grid.find(policy), reference, block)


def _cochran(figure: Figure, arms: Sequence[int], reference: dict[int, Pair], block: int) -> Iterator[Figure]:
    if len(arms) < 3 or not all(arm in reference for arm in arms):
        return
    agreement = np.array([reference[arm].agreement for arm in arms]).T
    compared: Flags = (agreement != NOT_COMPARABLE).all(axis=1)
    result = stats.cochran(agreement[compared] == 1, block)
    test = f"Cochran's Q, {len(arms)} conditions{stats.in_blocks(block)}"
    figure = replace(figure, n=int(compared.sum()), test=test)
    yield replace(figure, value=result[0], p_value=result[1], p_test=test) if result else figure


def _adjusted(figures: Iterable[Figure]) -> list[Figure]:
    figures = list(figures)
    tested = [index for index, figure in enumerate(figures) if figure.p_value is not None]
    adjusted = stats.holm([cast(float, figures[index].p_value) for index in tested])
    for index, p in zip(tested, adjusted, strict=True):
        told = f"{figures[index].test}; Holm over {len(tested)}"
        figures[index] = replace(figures[index], p_adjusted=p, family=len(tested), test=told)
    return figures
