"""A study as tables for people. Fits 80 columns, and is the same text when it is piped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import RenderableType
from rich.text import Text

from kvaudit.reports.study.words import (
    DEVIANCE_NOTE,
    FRONTIER_NOTE,
    MARKS,
    MEASURES_NOTE,
    axes_line,
    budget_sentences,
    by_fidelity,
    deviance_lines,
    deviance_rows,
    doubts,
    explained_sentence,
    plain,
    plain_percent,
    same_lines,
    setting,
    settings_line,
    skipped_lines,
    verdict_line,
)
from kvaudit.reports.terminal import print_parts
from kvaudit.reports.terminal.layout import grouped_table, heading, sentences, table
from kvaudit.reports.words.numbers import number, percent, small

if TYPE_CHECKING:
    from kvaudit.study.results import Explained, Row, StudyResults

ANSWERS = ("fidelity, %", "variation, %", "speed-up", "")


def render(results: StudyResults, out: TextIO) -> None:
    """Write the report to `out`; in colour and in the terminal's width where `out` is a terminal."""
    print_parts(_parts(results), out)


def _parts(results: StudyResults) -> Iterator[RenderableType]:
    yield Text(verdict_line(results), "bold" if not results.exit_code else "bold yellow")
    yield from sentences(doubts(results))
    yield from _studied(results)
    if results.kind == "switches":
        yield from _switches(results)
    if results.kind == "budgets":
        yield from heading("From which ratio on")
        yield from sentences(budget_sentences(results) or ["Nothing conclusive was measured."])
    yield from _frontier(results)
    yield from _cells(results)
    for explained in results.explained:
        yield from _deviance(explained)
    if results.explained:
        yield from sentences([DEVIANCE_NOTE])


def _studied(results: StudyResults) -> Iterator[RenderableType]:
    described = results.described
    yield from heading(f"What was studied: {results.kind}")
    yield from sentences(
        [
            f"trace: {described['trace'].get('source')}, {described['trace'].get('requests')} requests",
            axes_line(described),
            settings_line(described),
            *same_lines((same["name"], same["policies"], same["cell"], same["why"]) for same in described["same"]),
            *skipped_lines((skipped["name"], skipped["why"]) for skipped in described["skipped"]),
            *skipped_lines((name, f"the engine says: {why}") for name, why in described["refused"].items()),
        ]
    )


def _switches(results: StudyResults) -> Iterator[RenderableType]:
    yield from heading("Which switch explains the loss")
    yield from sentences([explained_sentence(explained) for explained in results.explained])


def _frontier(results: StudyResults) -> Iterator[RenderableType]:
    marks = {id(row): MARKS[standing] for row, standing in zip(results.rows, results.standing, strict=True)}
    yield from heading("Frontier of fidelity, answer variation and TTFT")
    rows = [
        (row, [plain_percent(row.mean_fidelity), plain_percent(row.variation), plain(row.speedup), marks[id(row)]])
        for row in by_fidelity(results.rows)
    ]
    yield _by_cell(results, ANSWERS, rows)
    yield from sentences([FRONTIER_NOTE, MEASURES_NOTE])


def _cells(results: StudyResults) -> Iterator[RenderableType]:
    yield from heading("Every cell")
    columns = ("chronol., %", "KL", "TTFT, ms", "runs", "captured", "reused")
    rows = [
        (
            row,
            [
                plain_percent(row.fidelity),
                small(row.kl),
                number(row.ttft_ms, 1),
                number(row.runs, 1),
                percent(row.captured, 0),
                percent(row.reuse, 0),
            ],
        )
        for row in results.rows
    ]
    yield _by_cell(results, columns, rows)
    yield from sentences(
        [
            "chronol.: fidelity in chronological order, Wilson interval. KL: divergence from full prefill, nats a "
            "token, mean over requests and orders. TTFT: median over orders. runs: separate regions recomputed a "
            "request, captured: share of the token deviation that was recomputed, both medians; reused: share of "
            "prompt tokens from the cache; these three in chronological order."
        ]
    )


def _by_cell(
    results: StudyResults, columns: Sequence[str], rows: Sequence[tuple[Row, Sequence[str]]]
) -> RenderableType:
    """Rows under their cell, or, where ratios are studied, under their policy; plain where there is one cell."""
    if len(results.cells) == 1:
        return table(("policy", *columns), [[row.policy, *cells] for row, cells in rows])
    if results.kind == "budgets":
        ordered = sorted(rows, key=lambda one: (one[0].policy, one[0].cell.recompute_ratio))
        return grouped_table(
            ("policy, ratio", *columns), [[row.policy, setting(row, results), *cells] for row, cells in ordered]
        )
    return grouped_table(
        ("cell, policy", *columns), [[setting(row, results), row.policy, *cells] for row, cells in rows]
    )


def _deviance(explained: Explained) -> Iterator[RenderableType]:
    yield from heading(f"Analysis of deviance: {explained.policy}, {explained.event}")
    if explained.deviance.cannot is not None:
        yield from sentences([explained_sentence(explained)])
        return
    columns = ("term", "df", "sequential", "drop-one", "share, %", "largest", "p")
    yield table(columns, deviance_rows(explained.deviance))
    yield from sentences(deviance_lines(explained))
