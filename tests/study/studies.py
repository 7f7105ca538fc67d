"""Studies on the scripted engine, with faults that depend on a switch, for several test modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fakes import rolling_trace

from kvaudit.engines import Engine, EngineSettings, Switches
from kvaudit.engines.scripted import ScriptedEngine
from kvaudit.errors import UsageError
from kvaudit.plan import make_plan
from kvaudit.records import Trace
from kvaudit.replay import Progress, Silent
from kvaudit.study.folder import new_study, open_study
from kvaudit.study.grid import make_grid
from kvaudit.study.results import StudyResults, study_results
from kvaudit.study.running import Study

TRACE = rolling_trace(5, window=3)
ENGINE = "scripted"


def faulty_under(fault: str, **switches: str) -> Callable[[EngineSettings], Engine]:
    """Opens the scripted engine with a fault that acts only where the switches have these values.

    It is one engine, and describes itself as such, whatever the switches.
    """

    class Faulty(ScriptedEngine):
        def describe(self) -> Mapping[str, object]:
            return {**super().describe(), "fault": f"{fault} under {sorted(switches.items())}"}

    def open_engine(settings: EngineSettings) -> Engine:
        acts = all(getattr(settings.switches, name) == value for name, value in switches.items())
        return Faulty(replace(settings, options={"fault": fault if acts else "none"}))

    return open_engine


def refusing(**switches: str) -> Callable[[EngineSettings], Engine]:
    """Opens the scripted engine, but not where the switches have these values."""

    def open_engine(settings: EngineSettings) -> Engine:
        if all(getattr(settings.switches, name) == value for name, value in switches.items()):
            raise UsageError(f"this engine has no {' and no '.join(switches.values())}")
        return ScriptedEngine(settings)

    return open_engine


def run_study(
    path: Path,
    kind: str = "budgets",
    *,
    trace: Trace = TRACE,
    open_engine: Callable[[EngineSettings], Engine] = ScriptedEngine,
    policies: Sequence[str] = ("token-topk",),
    orders: int = 2,
    fixed: Sequence[str] = (),
    force: bool = False,
    told: list[str] | None = None,
    progress: Progress | None = None,
    **switches: str,
) -> StudyResults:
    settings = EngineSettings(switches=replace(Switches(), **switches), recompute_ratio=0.5)
    grid = make_grid(kind, ENGINE, settings, policies, frozenset(fixed))
    plans = {
        cell.name: make_plan(
            len(trace.requests),
            ENGINE,
            replace(settings, recompute_ratio=cell.recompute_ratio, switches=cell.switches),
            cell.policies,
            orders,
        )
        for cell in grid.cells
    }
    with open_study(path, new_study(trace, grid, plans, 0.0), force=force) as folder:
        say = (lambda line: None) if told is None else told.append
        study = Study(trace, grid, plans, open_engine, folder, 0.0, progress or Silent(), say)
        return study_results(folder.described, list(study.run()))
