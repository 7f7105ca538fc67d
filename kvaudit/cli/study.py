"""`kvaudit replay --study` and `kvaudit report STUDY`: the same audit over a grid of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvaudit.cli.outputs import TERMINAL, destinations, print_report, write_file
from kvaudit.cli.progress import ReplayInterruptedError
from kvaudit.cli.values import default_run_folder, report_command
from kvaudit.errors import UsageError

if TYPE_CHECKING:
    from kvaudit.engines import EngineSettings
    from kvaudit.plan import Plan
    from kvaudit.records import Trace
    from kvaudit.study.folder import StudyFolder
    from kvaudit.study.grid import Kind, StudyGrid
    from kvaudit.study.results import CellResults, StudyResults


def replay_study(
    kind: Kind,
    path: Path,
    trace: Trace,
    engine: str,
    settings: EngineSettings,
    policies: Sequence[str],
    orders: int,
    fixed: frozenset[str],
    max_noise: float,
    output: Path | None,
    force: bool,
) -> int:
    """Run a study of the trace at `path`, say what it found, and return the exit code.

    `fixed` are the axes that the user set; without `policies` the study chooses them.
    """
    from kvaudit.plan import make_plan
    from kvaudit.reports.study.words import grid_lines, headline
    from kvaudit.study.folder import new_study, open_study
    from kvaudit.study.grid import make_grid
    from kvaudit.study.running import arms_to_run

    chosen = policies or _default_policies(kind, engine, settings)
    grid = make_grid(kind, engine, settings, chosen, fixed)
    plans: dict[str, Plan] = {}
    for cell in grid.cells:
        own = replace(settings, recompute_ratio=cell.recompute_ratio, switches=cell.switches)
        plans[cell.name] = make_plan(len(trace.requests), engine, own, cell.policies, orders)
    described = new_study(trace, grid, plans, max_noise)
    folder = output or default_run_folder(path, described["study_digest"], kind)
    for line in grid_lines(grid, arms_to_run(plans.values()), len(trace.requests)):
        _tell(line)
    with open_study(folder, described, force=force) as held:
        held.set_max_noise(max_noise)
        results = _ran(trace, grid, plans, engine, held, max_noise)
    for line in (*headline(results), f"Report: {report_command(folder)}"):
        typer.echo(line)
    return results.exit_code


def report_study(path: Path, formats: Sequence[str], outputs: Sequence[Path], ignored: Mapping[str, object]) -> int:
    """Report a study and return the exit code. `ignored` are options that say nothing about one, by name."""
    from kvaudit.reports.study import FORMATS as RENDERERS
    from kvaudit.reports.study.words import headline
    from kvaudit.study.results import read_results

    chosen = destinations(formats, outputs, (path,))
    for destination in chosen:
        if destination.format not in RENDERERS:
            raise UsageError(
                f"a study has no {destination.format} report",
                f"take {', '.join(RENDERERS)}, or report one of its cells",
            )
    if given := [name for name, value in ignored.items() if value]:
        raise UsageError(
            f"a study is held to no limits: {', '.join(given)}",
            f"hold one of its cells to them, kvaudit report {path}/cells/NAME",
        )
    results = read_results(path)
    for destination in sorted(chosen, key=lambda one: one.path is None):
        render = partial(RENDERERS[destination.format], results)
        if destination.path is not None:
            write_file(render, destination.path)
        else:
            print_report(render, escapes=destination.format == TERMINAL)
    if all(destination.path is not None for destination in chosen):
        print_report(lambda out: out.writelines(f"{line}\n" for line in headline(results)), escapes=True)
    return results.exit_code


def _ran(
    trace: Trace, grid: StudyGrid, plans: Mapping[str, Plan], engine: str, folder: StudyFolder, max_noise: float
) -> StudyResults:
    from kvaudit.cli.progress import progress_on_stderr
    from kvaudit.plugins import load
    from kvaudit.study.results import study_results
    from kvaudit.study.running import Study

    cells: list[CellResults] = []
    try:
        with progress_on_stderr() as progress:
            study = Study(trace, grid, plans, load("engines", engine), folder, max_noise, progress, _tell)
            cells.extend(study.run())
    except KeyboardInterrupt as stop:
        raise ReplayInterruptedError(
            f"interrupted: {len(cells)} of {len(grid.cells)} cells are finished and kept in {folder.path}",
            "the same command goes on from there",
        ) from stop
    return study_results(folder.described, cells)


def _default_policies(kind: Kind, engine: str, settings: EngineSettings) -> tuple[str, ...]:
    """For a study of policies every one that is known, whose signals the engine gives and that is not too costly."""
    from kvaudit.engines import unmet
    from kvaudit.errors import PluginError
    from kvaudit.plan import DEFAULT_POLICIES
    from kvaudit.plugins import available, load
    from kvaudit.policy_specs import read_policy
    from kvaudit.study.grid import COSTLY

    if kind != "policies":
        return DEFAULT_POLICIES
    opened = load("engines", engine)(settings)
    capabilities = opened.capabilities
    opened.close()
    chosen = []
    for name in available("policies"):
        try:
            policy = read_policy(name).make()
        except PluginError as error:
            _tell(f"{name}: left out, since it cannot be loaded: {error.message}")
            continue
        if policy.engine not in (None, engine):
            continue
        if name in COSTLY:
            _tell(f"{name}: left out, since it serves a request many times over; --policy {name} studies it")
        elif lacking := unmet(policy, capabilities):
            _tell(f"{name}: left out, since it needs {lacking}, which engine {engine!r} does not give")
        else:
            chosen.append(name)
    return tuple(chosen)


def _tell(line: str) -> None:
    from kvaudit.reports.escape import visible

    typer.echo(visible(line), err=True)
