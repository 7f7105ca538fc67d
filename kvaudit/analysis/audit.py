"""From a run's tables to an audit: comparisons, figures, findings, verdict. Pure: the store reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from kvaudit.analysis.baseline import Baseline, Side, against
from kvaudit.analysis.compare import Grid, Pair, PlannedArm, build_grid, compare, comparisons_table, conformed
from kvaudit.analysis.costs import cost_figures
from kvaudit.analysis.examples import Example, ProvenanceOf, worst_requests
from kvaudit.analysis.figures import Figure, answer_figures, stream_overlap, summary_table
from kvaudit.analysis.findings import Finding, find
from kvaudit.analysis.gates import Gates
from kvaudit.analysis.limits import MAX_NOISE, MAX_RETRIED, Limits
from kvaudit.analysis.verdict import Verdict, decide
from kvaudit.errors import RunError


class RunTables(Protocol):
    """What an audit needs of a run. `table` gives whole tables of `schema.TABLES`, of finished arms only."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...
    def arms(self) -> Sequence[PlannedArm]: ...
    def table(self, name: str) -> pa.Table: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """Everything that a report may say.

    `requests` counts the trace's requests, `gates` are the user's limits, `baseline` is what changed since another run,
    where one was named. `grid` and `pairs` hold every observation and every comparison.
    """

    manifest: Mapping[str, Any]
    arms: tuple[PlannedArm, ...]
    requests: int
    findings: tuple[Finding, ...]
    gates: Gates
    verdict: Verdict
    figures: tuple[Figure, ...]
    examples: tuple[Example, ...]
    grid: Grid
    pairs: tuple[Pair, ...]
    baseline: Baseline | None = None

    @property
    def comparisons(self) -> pa.Table:
        """The `comparisons` table."""
        return comparisons_table(self.grid, self.pairs)

    @property
    def summary(self) -> pa.Table:
        """The `summary` table."""
        return summary_table(self.figures)


def analyse(
    run: RunTables,
    gates: Gates | None = None,
    provenance: ProvenanceOf | None = None,
    baseline: RunTables | None = None,
) -> Audit:
    """The audit of a run.

    `provenance` looks up rows of that table (`Run.provenance`); without it the origins of damage are not shown.
    `baseline` is an earlier run to hold this one against. Raises RunError for tables or a manifest that are not this
    version's, UsageError for gates on a policy that the run does not have.
    """
    gates = gates or Gates()
    side, overlap = _compared(run)
    grid, pairs, seed = side.grid, side.pairs, _seed(run.manifest)
    figures = (*answer_figures(grid, pairs, overlap, seed), *cost_figures(grid))
    changed = None if baseline is None else against(side, _compared(baseline)[0], seed)
    return Audit(
        manifest=run.manifest,
        arms=grid.arms,
        requests=len(grid.request_ids),
        findings=side.findings,
        gates=gates,
        verdict=decide(side.findings, figures, gates, changed),
        figures=figures,
        examples=worst_requests(grid, pairs, provenance),
        grid=grid,
        pairs=pairs,
        baseline=changed,
    )


def section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the manifest; empty where it has none."""
    found = manifest.get(name)
    return found if isinstance(found, Mapping) else {}


def _compared(run: RunTables) -> tuple[Side, int]:
    """A run's answers compared and its findings, and how far the stream's windows overlap."""
    requests = conformed(run.table("requests"), "requests")
    overlap = stream_overlap(requests)
    restarted = section(run.manifest, "engine").get("restarted") is True
    grid = build_grid(run.table("observations"), requests, tuple(run.arms()), restarted=restarted)
    pairs = compare(grid)
    findings = find(grid, pairs, _limits(run.manifest), overlap)
    return Side(run.manifest, findings, grid, pairs, requests), overlap


def _seed(manifest: Mapping[str, Any]) -> int:
    seed = section(manifest, "settings").get("seed")
    return seed if isinstance(seed, int) and seed >= 0 else 0


def _limits(manifest: Mapping[str, Any]) -> Limits:
    return Limits(_limit(manifest, "max_noise", MAX_NOISE), _limit(manifest, "max_retried", MAX_RETRIED))


def _limit(manifest: Mapping[str, Any], name: str, default: float) -> float:
    limit = section(manifest, "settings").get(name)
    if limit is None:
        return default
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit <= 1:
        raise RunError(f"the manifest's {name} is {limit!r}, not a share from 0 to 1")
    return float(limit)
