"""`kvaudit compare`: what changed from one run to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.cli.outputs import TERMINAL, print_report
from kvaudit.errors import UsageError

FORMATS = (TERMINAL, "json")


def compare(
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="The earlier run.")],
    now: Annotated[Path, typer.Argument(metavar="RUN_B", help="The later one.")],
    report_format: Annotated[
        str, typer.Option("--format", "-f", metavar="NAME", help=f"{' or '.join(FORMATS)}.")
    ] = TERMINAL,
) -> None:
    """Show what changed from RUN_A to RUN_B: settings, versions, figures, requests that flip.

    Requests are paired where both runs have the same prompt under the same id, arms where both served them in the same
    order. Limits on what may change belong to `kvaudit report RUN_B --baseline RUN_A`. Exit code: 0; 2 a bad run; 4
    when nothing could be paired, or a policy of either run is inconclusive.

    \b
    Examples:
      kvaudit compare runs/last-week runs/today
      kvaudit compare runs/lmcache runs/isolated --format json
    """
    if report_format not in FORMATS:
        raise UsageError(f"unknown format {report_format!r}", f"known: {', '.join(FORMATS)}")
    from kvaudit.analysis.verdict import EXIT_CODES
    from kvaudit.cli.report import audited

    audit = audited(now, baseline=before)[1]
    changed = audit.baseline
    assert changed is not None
    if report_format == TERMINAL:
        from kvaudit.reports.terminal import render_baseline as render
    else:
        from kvaudit.reports.json import render_baseline as render
    print_report(lambda out: render(audit, out), escapes=report_format == TERMINAL)
    doubtful = any(finding.seen == "inconclusive" for finding in (*audit.findings, *changed.findings))
    raise typer.Exit(EXIT_CODES["inconclusive"] if doubtful or not changed.changes else 0)
