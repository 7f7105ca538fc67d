"""`kvaudit report`: say what a run found, in any format."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.cli.gate_files import non_inferiority, wanted_gates
from kvaudit.cli.outputs import (
    TERMINAL,
    Destination,
    append_step_summary,
    destinations,
    exit_code,
    print_report,
    write_file,
    write_folder,
)
from kvaudit.errors import UsageError
from kvaudit.plugins import BUILT_IN, load

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit
    from kvaudit.analysis.gates import Gates
    from kvaudit.store import Run

FORMATS = ", ".join(BUILT_IN["reports"])


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `kvaudit replay` wrote.")],
    report_format: Annotated[
        list[str] | None, typer.Option("--format", "-f", metavar="NAME", help=f"{FORMATS}. Repeatable.")
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to a file in place of stdout; one for each --format, or alone when its ending says the format.",
        ),
    ] = None,
    step_summary: Annotated[
        bool, typer.Option("--step-summary", help="Add the Markdown report to the file in $GITHUB_STEP_SUMMARY.")
    ] = False,
    min_fidelity: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Fail when a policy's fidelity in its worst order is below this."),
    ] = None,
    max_variation: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Fail when a policy's answer variation is above this.")
    ] = None,
    non_inferior: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY,THAN,MARGIN", help="POLICY's fidelity may be at most MARGIN below THAN's. Repeatable."
        ),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Hold the run against an earlier one and show what changed.")
    ] = None,
    max_fidelity_drop: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="A policy's fidelity may be at most this below the baseline's."),
    ] = None,
    max_variation_rise: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Its answer variation may be at most this above the baseline's."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Hold only this policy to the limits. Repeatable.")
    ] = None,
    gates: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Limits from this file. [default: the nearest kvaudit.toml or pyproject.toml]"
        ),
    ] = None,
    exit_zero: Annotated[
        bool,
        typer.Option("--exit-zero", help="Exit with 0 whatever the verdict is; reports give it as it is, JUnit too."),
    ] = False,
) -> None:
    """Report the audit of a run: verdict, findings and the figures behind them.

    Limits are shares from 0 to 1, from options or from `[tool.kvaudit.gates]` of pyproject.toml or `[gates]` of
    kvaudit.toml. --min-fidelity and --max-variation fail when the observed value breaks them (variation: and noise is
    ruled out), pass when its 95 % bound keeps them, and are inconclusive in between; the others are judged by the
    bounds of the paired 95 % interval alone.
    Of a study (`kvaudit replay --study`), as terminal, json or csv: its frontier, its cells and what its switches
    explain. Limits are for its cells, each a run of its own.
    Exit code: 0 pass, or no limits and a conclusive audit; 1 a limit failed; 2 a bad run or wrong usage; 3 a policy
    failed in a cell of a study; 4 inconclusive. --exit-zero changes the exit code alone: reports give the verdict and
    its exit code, and JUnit counts failures, as without it.

    \b
    Examples:
      kvaudit report runs/prices
      kvaudit report runs/prices -o audit.html -o audit.json
      kvaudit report runs/prices --format junit -o kvaudit.xml --min-fidelity 0.9 --policy document-aligned
      kvaudit report runs/prices --non-inferior document-aligned,token-topk,0.02
      kvaudit report runs/prices --baseline runs/last-week --max-fidelity-drop 0.01 --step-summary
      kvaudit report runs/prices --format parquet -o prices-audit
      kvaudit report studies/switches -o switches.json
    """
    from kvaudit.study.folder import is_study

    if is_study(run):
        from kvaudit.cli.study import report_study

        limits = {
            "--min-fidelity": min_fidelity is not None,
            "--max-variation": max_variation is not None,
            "--max-fidelity-drop": max_fidelity_drop is not None,
            "--max-variation-rise": max_variation_rise is not None,
            "--non-inferior": bool(non_inferior),
            "--baseline": baseline is not None,
            "--policy": bool(policy),
            "--gates": gates is not None,
            "--step-summary": step_summary,
        }
        raise typer.Exit(exit_code(report_study(run, report_format or (), output or (), limits), exit_zero))
    wanted = wanted_gates(
        gates,
        {
            "min_fidelity": min_fidelity,
            "max_variation": max_variation,
            "max_fidelity_drop": max_fidelity_drop,
            "max_variation_rise": max_variation_rise,
            "non_inferior": tuple(map(non_inferiority, non_inferior)) if non_inferior else None,
            "policies": tuple(policy) if policy else None,
        },
        baseline,
    )
    runs = (run,) if wanted.baseline is None else (run, wanted.baseline)
    chosen = destinations(report_format or (), output or (), runs)
    for destination in chosen:
        load("reports", destination.format)
    source, audit = audited(run, wanted.gates, wanted.baseline)
    _deliver(audit, source, chosen)
    if step_summary:
        from kvaudit.reports.markdown import SUMMARY_LIMIT, markdown

        append_step_summary(lambda room: markdown(audit, room), SUMMARY_LIMIT)
    raise typer.Exit(exit_code(audit.verdict.exit_code, exit_zero))


def audited(folder: Path, gates: Gates | None = None, baseline: Path | None = None) -> tuple[Run, Audit]:
    """A run folder and its audit. Raises RunError, naming the file, for a folder that is no whole run."""
    from kvaudit.analysis.audit import analyse
    from kvaudit.store import open_run

    if baseline is not None and baseline.resolve() == folder.resolve():
        raise UsageError(f"{folder} is held against itself", "name another run")
    run = open_run(folder)
    earlier = None if baseline is None else open_run(baseline)
    for opened in (run, earlier):
        if opened is not None:
            opened.check()
    return run, analyse(run, gates, run.provenance, earlier)


def _deliver(audit: Audit, run: Run, chosen: Sequence[Destination]) -> None:
    """Write every report, stdout last: a verdict that was printed must not be followed by an error.

    Where none goes to stdout, stdout gets the findings and the verdict, a line each.
    """
    from kvaudit.reports.words.verdict import headline

    for destination in sorted(chosen, key=lambda one: (one.path is None, not one.is_folder)):
        write = load("reports", destination.format)
        if destination.is_folder and destination.path is not None:
            write_folder(partial(write, audit, run), destination.path)
        elif destination.path is not None:
            write_file(partial(write, audit), destination.path)
        else:
            print_report(partial(write, audit), escapes=destination.format == TERMINAL)
    if all(destination.path is not None for destination in chosen):
        print_report(lambda out: out.writelines(f"{line}\n" for line in headline(audit)), escapes=True)
