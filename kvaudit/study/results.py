"""What came out of a study: a row for each policy of each cell, the frontier, and what the switches explain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvaudit.analysis import stats
from kvaudit.analysis.audit import Audit, analyse
from kvaudit.analysis.checks import OF_ROUNDING, Reason
from kvaudit.analysis.costs import speedups
from kvaudit.analysis.deviance import Deviance, Responses, deviance
from kvaudit.analysis.figures import select
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.frontier import Point, Standing, standings
from kvaudit.analysis.stats import Estimate, Integers
from kvaudit.analysis.verdict import EXIT_CODES
from kvaudit.errors import EngineError, RunError
from kvaudit.records import CHRONOLOGICAL
from kvaudit.store import open_run
from kvaudit.store.layout import MANIFEST
from kvaudit.store.manifest import FINISHED
from kvaudit.study.folder import Described, cell_of, cell_path, check_untold, read_study
from kvaudit.study.grid import RATIO, Cell

FIDELITY, VARIATION = "fidelity", "answer variation"
UNREUSED = "nothing-reused"
"""The reason that a control cell is there to give."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Per request over the orders: answers that equal full prefill's and those compared, pairs of orders that differ
    and those compared; int64 [R] each."""

    equal: Integers
    answers: Integers
    differing: Integers
    pairs: Integers


@dataclass(frozen=True, slots=True)
class Row:
    """A policy in a cell. `mean_fidelity` is over all orders, with an interval over requests; runs (fragmentation) and
    captured deviation are medians in chronological order, kl the mean over requests and orders, in nats a token."""

    cell: Cell
    policy: str
    finding: Finding
    fidelity: Estimate | None
    mean_fidelity: Estimate | None
    variation: Estimate | None
    kl: float | None
    ttft_ms: float | None
    speedup: Estimate | None
    runs: float | None
    captured: float | None
    reuse: float | None
    counts: Counts

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Why nothing can be said of this row. That nothing was reused is what a control cell is there to show."""
        return tuple(
            reason for reason in self.finding.reasons if not (self.cell.is_control and reason.code == UNREUSED)
        )


@dataclass(frozen=True, slots=True)
class CellResults:
    cell: Cell
    rows: tuple[Row, ...]
    seed: int


class Failure(NamedTuple):
    """A policy that failed in a cell, and the error that it failed with."""

    cell: str
    policy: str
    why: str


@dataclass(frozen=True, slots=True)
class Explained:
    """An analysis of deviance of one policy and one event."""

    policy: str
    event: str
    deviance: Deviance


@dataclass(frozen=True, slots=True)
class StudyResults:
    """`described` is study.json. `missing` are cells that have not begun, and those that cannot be read: `unreadable`
    says of these why, by name. `standing` has an entry for each row.

    A policy that failed in a cell has no row there.
    """

    described: Mapping[str, Any]
    rows: tuple[Row, ...]
    standing: tuple[Standing, ...]
    missing: tuple[str, ...]
    explained: tuple[Explained, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.described["kind"])

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell_of(cell) for cell in self.described["cells"])

    @property
    def doubtful(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.reasons)

    @property
    def failed(self) -> tuple[Failure, ...]:
        return tuple(
            Failure(cell.name, policy, why)
            for cell in self.cells
            for policy, why in self.described["failed"].get(cell.name, {}).items()
        )

    @property
    def exit_code(self) -> int:
        """That of a failed replay when a policy failed in a cell, that of an inconclusive audit when a cell is missing
        or a row inconclusive, else 0: no gates apply."""
        if self.failed:
            return EngineError.exit_code
        return EXIT_CODES["inconclusive"] if self.missing or self.doubtful or not self.rows else EXIT_CODES["no gates"]


def read_results(path: Path) -> StudyResults:
    """Every cell that has begun, one in memory at a time. A cell that is damaged, or whose replay was killed before its
    tables were written, counts as missing.

    Raises RunError for a study.json that is damaged or contradicts its cells, and for a cell of another study.
    """
    described, unreadable = read_study(path), dict[str, str]()
    results = study_results(described, _read_cells(path, described, unreadable))
    return replace(results, unreadable=unreadable)


def study_results(described: Described, cells: Iterable[CellResults]) -> StudyResults:
    """`cells` as they come; those of study.json that are not among them are missing, unless the engine refused them."""
    found = {results.cell.name: results for results in cells}
    planned = [str(cell["name"]) for cell in described["cells"]]
    failed = {(name, policy) for name, policies in described["failed"].items() for policy in policies}
    rows = tuple(
        row
        for name in planned
        if name in found
        for row in found[name].rows
        if (row.cell.name, row.policy) not in failed
    )
    missing = tuple(name for name in planned if name not in found and name not in described["refused"])
    points = [Point(None, None, None) if row.finding.reasons else _point(row) for row in rows]
    seed = next((results.seed for results in found.values()), 0)
    explained = _explained(described, rows, seed) if described["kind"] == "switches" else ()
    return StudyResults(described, rows, tuple(standings(points)), missing, explained)


def cell_results(cell: Cell, audit: Audit) -> CellResults:
    """The part of a cell's audit that a study needs, a few numbers a request."""
    settings = audit.manifest.get("settings", {})
    seed = int(settings.get("seed") or 0)
    rows = tuple(_row(cell, audit, finding, seed) for finding in audit.findings)
    return CellResults(cell, rows, seed)


def _read_cells(path: Path, described: Described, unreadable: dict[str, str]) -> Iterator[CellResults]:
    """The cells that can be read; why others cannot goes into `unreadable`, by name."""
    for planned in described["cells"]:
        folder = cell_path(path, planned["name"])
        if not (folder / MANIFEST).exists():
            continue
        try:
            run = open_run(folder)
            is_own = run.manifest["settings_digest"] == planned["settings_digest"]
            if is_own and run.manifest.get("engine") is not None:  # None: stopped before its own first arm
                run.check()
                yield cell_results(cell_of(planned), analyse(run))
        except RunError as error:
            unreadable[planned["name"]] = str(error)
            continue
        if not is_own:
            raise RunError(f"{folder} belongs to another study", "move it away and run the same study again")
        if run.manifest["status"] == FINISHED:
            check_untold(path, described, planned["name"])


def _row(cell: Cell, audit: Audit, finding: Finding, seed: int) -> Row:
    policy = finding.policy
    counts = _counts(audit, policy)
    shares = np.where(counts.answers > 0, counts.equal / np.maximum(counts.answers, 1), np.nan)
    (mean,) = stats.mean_intervals(shares[None], finding.block, (0.0, 1.0), seed)

    def value(metric: str, order: str | None = None) -> float | None:
        found = select(audit.figures, metric, policy, order, "none")
        return found[0].value if found else None

    def estimate(metric: str, order: str | None = None) -> Estimate | None:
        figure = next(iter(select(audit.figures, metric, policy, order, "none")), None)
        if figure is None or figure.value is None:
            return None
        return Estimate(figure.value, figure.low, figure.high, figure.n or 0, figure.test or "")

    return Row(
        cell=cell,
        policy=policy,
        finding=finding,
        fidelity=estimate("fidelity", CHRONOLOGICAL),
        mean_fidelity=mean,
        variation=estimate("answer_variation"),
        kl=_over_orders(audit, "kl_mean", policy),
        ttft_ms=value("ttft_median"),
        speedup=stats.median_interval(speedups(audit.grid, policy)),
        runs=value("fragmentation", CHRONOLOGICAL),
        captured=value("captured_deviation", CHRONOLOGICAL),
        reuse=value("reuse_share", CHRONOLOGICAL),
        counts=counts,
    )


def _counts(audit: Audit, policy: str) -> Counts:
    arms = set(audit.grid.find(policy))
    zero = np.zeros(audit.requests, np.int64)
    equal, answers, differing, pairs = (zero.copy() for _ in range(4))
    for pair in audit.pairs:
        if pair.kind == "reference" and pair.right in arms:
            equal += pair.comparable & ~pair.differs
            answers += pair.comparable
        elif pair.kind == "orders" and pair.policy == policy:
            differing += pair.differs
            pairs += pair.comparable
    return Counts(equal, answers, differing, pairs)


def _over_orders(audit: Audit, metric: str, policy: str) -> float | None:
    found = select(audit.figures, metric, policy, control="none")
    known = [(figure.value, figure.n) for figure in found if figure.value is not None and figure.n]
    return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None


def _point(row: Row) -> Point:
    return Point(row.mean_fidelity, row.variation, row.speedup)


def _explained(described: Described, rows: Sequence[Row], seed: int) -> tuple[Explained, ...]:
    """For each policy: how often answers equal full prefill's, and how often two orders differ, by the switches.

    Rows that are inconclusive are left out, but for those that are so because of rounding alone: what rounding decides
    is lost under their switches all the same.
    """
    explained = []
    for policy in dict.fromkeys(row.policy for row in rows):
        mine = _balanced(described, [row for row in rows if row.policy == policy and _was_measured(row)])
        factors = {axis: [values[axis] for values, _ in mine] for axis in _switches(described)}
        block = max((row.finding.block for _, row in mine), default=1)
        for event in (FIDELITY, VARIATION):
            counted = [
                (row.counts.equal, row.counts.answers)
                if event == FIDELITY
                else (row.counts.differing, row.counts.pairs)
                for _, row in mine
            ]
            shape = (len(mine), -1) if mine else (0, 0)
            events, trials = (np.array([pair[side] for pair in counted], np.int64).reshape(shape) for side in (0, 1))
            explained.append(Explained(policy, event, deviance(Responses(factors, events, trials), block, seed)))
    return tuple(explained)


def _was_measured(row: Row) -> bool:
    return all(reason.code in OF_ROUNDING for reason in row.finding.reasons)


def _balanced(described: Described, rows: Sequence[Row]) -> list[tuple[Mapping[str, str], Row]]:
    """A policy's rows with their switches, and once more with those of every cell that is known to be equal.

    Without these copies a switch would be compared only where no combination was left out, and shares would go by a
    grid with holes. They make nothing look more certain than it is: intervals and p-values rest on blocks of requests,
    each of which is drawn, or has its values exchanged, in all cells at once, copies among them.
    """
    switches = _switches(described)
    by_name = {".".join(values): values for values in product(*switches.values())}
    by_cell = {row.cell.name: row for row in rows}
    copies = [
        (dict(zip(switches, by_name[same["name"]], strict=True)), by_cell[same["cell"]])
        for same in described["same"]
        if not same["policies"] and same["cell"] in by_cell and same["name"] in by_name
    ]
    return [*(({axis: str(row.cell.value(axis)) for axis in switches}, row) for row in rows), *copies]


def _switches(described: Described) -> dict[str, list[str]]:
    """The axes that are switches, with their values."""
    return {axis: [str(value) for value in values] for axis, values in described["axes"].items() if axis != RATIO}
