"""The audit as tables for people: verdict and reasons first, then the figures behind them.

Fits 80 columns, needs no colour, and is the same text when it is piped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from kvaudit.reports.terminal import answers, baseline, costs, examples, settings
from kvaudit.reports.terminal.layout import heading, sentences
from kvaudit.reports.words.findings import details_beside_line, finding_line
from kvaudit.reports.words.gates import gate_sentence
from kvaudit.reports.words.verdict import gates_source, verdict_line

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

COLOURS = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow", "no gates": "bold"}


NARROWEST, WIDEST = 20, 400


def render(audit: Audit, out: TextIO) -> None:
    """Write the report to `out`; in colour and in the terminal's width where `out` is a terminal."""
    print_parts(_parts(audit), out)


def render_baseline(audit: Audit, out: TextIO) -> None:
    """Write only what changed since the audit's baseline."""
    print_parts(baseline.parts(audit), out)


def print_parts(parts: Iterable[RenderableType], out: TextIO) -> None:
    """Print as wide as a terminal is, or 80 columns, without trailing spaces."""
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    console.width = min(max(console.width, NARROWEST), WIDEST)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    # Paragraphs and tables are padded to their width: of no use to anybody in a file or a pipe.
    out.writelines(f"{line.rstrip()}\n" for line in captured.get().lstrip("\n").split("\n")[:-1])


def _parts(audit: Audit) -> Iterator[RenderableType]:
    yield from _verdict(audit)
    yield from baseline.parts(audit)
    yield from settings.parts(audit)
    yield from answers.parts(audit)
    yield from costs.parts(audit)
    yield from examples.parts(audit)


def _verdict(audit: Audit) -> Iterator[RenderableType]:
    yield Text(verdict_line(audit.verdict), COLOURS[audit.verdict.outcome])
    yield from sentences([*(gate_sentence(result) for result in audit.verdict.gates), *gates_source(audit)])
    yield from heading("Findings")
    if not audit.findings:
        yield Text("No policy was audited.")
    for finding in audit.findings:
        yield Text(finding_line(finding, audit.figures))
        yield from sentences(details_beside_line(finding))
