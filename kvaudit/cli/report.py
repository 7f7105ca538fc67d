"""`kvaudit report`: print what a run found."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.errors import RunError, UsageError
from kvaudit.plugins import load

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit
    from kvaudit.analysis.verdict import Gates
    from kvaudit.reports import Report

TERMINAL = "terminal"


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that `kvaudit replay` wrote.")],
    report_format: Annotated[str, typer.Option("--format", "-f", metavar="NAME", help="terminal or json.")] = TERMINAL,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file, in place of stdout.")
    ] = None,
    min_fidelity: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Fail when a policy's fidelity in its worst order is below this."),
    ] = None,
    max_variation: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Fail when a policy's answer variation is above this.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Hold only this policy to the limits. Repeatable.")
    ] = None,
    exit_zero: Annotated[bool, typer.Option("--exit-zero", help="Exit with 0 whatever the verdict is.")] = False,
) -> None:
    """Print the audit of a run: verdict, findings and the figures behind them.

    Limits are shares from 0 to 1. A limit fails when the observed value breaks it, passes when its 95 % bound keeps
    it, and is inconclusive in between. Exit code: 0 pass, or no limits and a conclusive audit; 1 a limit failed; 2 a
    bad run or wrong usage; 4 inconclusive.

    \b
    Examples:
      kvaudit report runs/prices
      kvaudit report runs/prices --format json -o audit.json
      kvaudit report runs/prices --min-fidelity 0.9 --max-variation 0.05 --policy document-aligned
    """
    render: Report = load("reports", report_format)
    audit = load_audit(run, _gates(min_fidelity, max_variation, policy))
    if output is None:
        _print(render, audit, escapes=report_format == TERMINAL)
    else:
        _write(render, audit, output)
    raise typer.Exit(0 if exit_zero else audit.verdict.exit_code)


def load_audit(folder: Path, gates: Gates | None = None) -> Audit:
    """The audit of a run folder. Raises RunError, naming the file, for a folder that is no whole run."""
    from kvaudit.analysis.audit import analyse
    from kvaudit.store import open_run

    run = open_run(folder)
    return analyse(run, gates, run.provenance)


def _gates(min_fidelity: float | None, max_variation: float | None, policies: Sequence[str] | None) -> Gates:
    from kvaudit.analysis.verdict import Gates

    gates = Gates(min_fidelity, max_variation, tuple(policies) if policies else None)
    if policies and not gates.any:
        raise UsageError("--policy limits --min-fidelity and --max-variation, and neither is given", "add one of them")
    return gates


def _print(render: Report, audit: Audit, *, escapes: bool) -> None:
    """Write to stdout: escaped where its encoding falls short when people read it, in UTF-8 when programs do."""
    out = sys.stdout
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(**({"errors": "backslashreplace"} if escapes else {"encoding": "utf-8"}))
    render(audit, out)
    out.flush()


def _write(render: Report, audit: Audit, output: Path) -> None:
    """Write a file that is either whole or as it was."""
    path = output.resolve()
    try:
        if path.exists() and not path.is_file():  # a pipe or a device: nothing to replace
            with open(path, "w", encoding="utf-8") as file:
                render(audit, file)
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", encoding="utf-8", newline="\n") as file:
                render(audit, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}", "choose another file with -o") from error
