"""A study's cells, one after the other: full prefill is computed once, and what was finished stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from kvaudit.analysis.audit import analyse
from kvaudit.engines import Engine, EngineSettings
from kvaudit.errors import EngineError, KvauditError, PolicyError, UsageError
from kvaudit.plan import Plan
from kvaudit.records import FULL_PREFILL, Trace
from kvaudit.replay import Progress, Silent, replay
from kvaudit.schema import QUERIES
from kvaudit.schema.reference import queries
from kvaudit.store import Run, RunFolder, new_manifest, open_folder
from kvaudit.study.folder import StudyFolder
from kvaudit.study.grid import Cell, StudyGrid
from kvaudit.study.results import CellResults, cell_results

OpenEngine = Callable[[EngineSettings], Engine]


def arms_to_run(plans: Iterable[Plan]) -> int:
    """Arms that a study of these cells runs: those of each cell's policies, and full prefill's once."""
    arms = [arm for plan in plans for arm in plan.arms]
    return sum(arm.policy != FULL_PREFILL for arm in arms) + len({a.arm_id for a in arms if a.policy == FULL_PREFILL})


class CellRefusedError(KvauditError):
    """The engine does not open with a cell's switches."""


@dataclass
class Study:
    """What runs: the grid with a plan for each cell by its name, on the engine that `open_engine` opens.

    `told` is given a line for people now and then.
    """

    trace: Trace
    grid: StudyGrid
    plans: Mapping[str, Plan]
    open_engine: OpenEngine
    folder: StudyFolder
    max_noise: float
    progress: Progress = field(default_factory=Silent)
    told: Callable[[str], None] = lambda line: None

    def run(self) -> Iterator[CellResults]:
        """Run or take up every cell, and give what came out of each, in order.

        A cell with which the engine does not open is skipped, and a policy that fails in a cell is left out of it:
        study.json says why. Raises the first refusal when the engine opens with no cell at all, and EngineError when
        full prefill fails, since every cell would be held against it.
        """
        opener, progress = _Opener(self.open_engine, self.folder), _StudyProgress(self)
        source: Run | None = None
        refused: KvauditError | None = None
        for cell in self.grid.cells:
            try:
                run, results = self._run_cell(cell, source, opener, progress)
            except CellRefusedError as error:
                refused = refused or error
                self.folder.refuse(cell.name, error.message)
                self.told(f"{cell.name}: skipped, since the engine refuses it: {error.message}")
                continue
            source = source or run
            yield results
        if source is None and refused is not None:
            raise UsageError(refused.message, refused.hint)

    def _run_cell(
        self, cell: Cell, source: Run | None, opener: _Opener, progress: _StudyProgress
    ) -> tuple[Run, CellResults]:
        """The first cell computes full prefill, and its second run on an engine that shares nothing with the first;
        `source` is that cell for all others."""
        plan = self.plans[cell.name]
        manifest = new_manifest(self.trace, plan, self.max_noise)
        with open_folder(self.folder.cell(cell.name), manifest, force=self.folder.replacing) as folder:
            shared = [arm.arm_id for arm in plan.arms if arm.policy == FULL_PREFILL] if source is not None else []
            progress.cell(cell.name, len(plan.arms), len(shared))
            kept = {arm.arm_id for arm in plan.arms} <= folder.finished
            if source is None or kept:
                self._replay(cell, plan, folder, lambda: opener.open_alone(cell, plan.settings), opener, progress)
            else:
                engine = opener.open(cell, plan.settings)
                try:
                    folder.adopt(source, shared)
                except BaseException:
                    engine.close()
                    raise
                self._replay(cell, plan, folder, lambda: engine, opener, progress)
            folder.set_limits(self.max_noise)
            audit = analyse(folder.run)
            folder.write_table("comparisons", audit.comparisons.to_batches())
            folder.write_table("summary", audit.summary.to_batches())
            folder.write_text(QUERIES, queries())
            return folder.run, cell_results(cell, audit)

    def _replay(
        self,
        cell: Cell,
        plan: Plan,
        folder: RunFolder,
        open_first: Callable[[], Engine],
        opener: _Opener,
        progress: _StudyProgress,
    ) -> None:
        """Every arm of the cell but those of policies that fail: each is left out from there on, and the others go on
        with a newly opened engine. A policy that failed before is tried again."""
        failed: dict[str, str] = {}
        opening = open_first
        while plan.specs:
            try:
                replay(self.trace, opening, plan, folder, progress)
                break
            except (EngineError, PolicyError) as error:
                arm = next((arm for arm in plan.arms if arm.arm_id == progress.running), None)
                if arm is None or arm.policy == FULL_PREFILL:
                    raise
                failed[arm.policy] = error.message
                self.told(f"{cell.name}: policy {arm.policy} failed and is left out: {error.message}")
                progress.left_out(sum(other.policy == arm.policy for other in plan.arms))
                plan = replace(plan, specs=tuple(spec for spec in plan.specs if spec.name != arm.policy))
                folder.take_stock()
                opening = partial(opener.open_alone, cell, plan.settings)
        self.folder.set_failed(cell.name, failed)


class _Opener:
    """Opens engines for cells. The last one is kept until the next is there, so that an engine that shares weights
    between openings need not load them again."""

    def __init__(self, open_engine: OpenEngine, folder: StudyFolder) -> None:
        self._open, self._folder = open_engine, folder
        self._last: Engine | None = None

    def open(self, cell: Cell, settings: EngineSettings) -> Engine:
        try:
            engine = self._open(settings)
        except UsageError as error:
            raise CellRefusedError(error.message, error.hint) from error
        try:
            self._folder.begin(engine, cell.name)
        except BaseException:
            engine.close()
            raise
        self._last = engine
        return engine

    def open_alone(self, cell: Cell, settings: EngineSettings) -> Engine:
        """Open an engine while no other stands in memory."""
        self._last = None
        return self.open(cell, settings)


class _StudyProgress:
    """A study's progress, told as that of one replay: copies of full prefill are no work and are not counted.

    `running` is the arm that runs now, None while its engine is being opened.
    """

    def __init__(self, study: Study) -> None:
        self._shown, self._told = study.progress, study.told
        self._requests = len(study.trace.requests)
        self._arms = arms_to_run(study.plans.values())
        self.running: str | None = None
        self._name, self._before, self._own, self._shared = "", 0, 0, 0
        self._began: float | None = None
        self._estimated = False

    def cell(self, name: str, arms: int, shared: int) -> None:
        self._before += self._own
        self._name, self._own, self._shared = name, arms - shared, shared

    def left_out(self, arms: int) -> None:
        """So many arms of this cell are not run any more."""
        self._own, self._arms = self._own - arms, self._arms - arms

    def begin(self, total: int, done: int) -> None:
        self.running = None
        copied = min(done, self._shared * self._requests)
        self._shown.begin(self._arms * self._requests, self._before * self._requests + done - copied)

    def arm(self, arm_id: str, number: int, arms: int) -> None:
        self.running = arm_id
        place = self._before + number - self._shared
        self._estimate(self._arms - place + 1)
        self._shown.arm(f"{self._name}: {arm_id}", place, self._arms)

    def served(self) -> None:
        self._shown.served()

    def _estimate(self, left: int) -> None:
        """Once, when the first arm of this process is done."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        elif not self._estimated:
            self._estimated = True
            took = now - self._began
            self._told(
                f"the first arm took {_duration(took)}: about {_duration(took * left)} for the {left:,} arms that are "
                "left, if each takes as long"
            )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
