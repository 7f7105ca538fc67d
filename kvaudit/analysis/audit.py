"""From a run's tables to an audit: comparisons, figures, findings, verdict. Pure: the store reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from kvaudit.analysis.compare import Grid, PlannedArm, build_grid, compare, comparisons_table, conformed
from kvaudit.analysis.costs import cost_figures
from kvaudit.analysis.examples import Example, ProvenanceOf, worst_requests
from kvaudit.analysis.figures import Figure, answer_figures, stream_overlap, summary_table
from kvaudit.analysis.limits import MAX_NOISE
from kvaudit.analysis.verdict import Finding, Gates, Verdict, decide, find
from kvaudit.errors import RunError


class RunTables(Protocol):
    """What an audit needs of a run. `table` gives whole tables of `schema.TABLES`, of finished arms only."""

    @property
    def manifest(self) -> Mapping[str, Any]: ...
    def arms(self) -> Sequence[PlannedArm]: ...
    def table(self, name: str) -> pa.Table: ...


@dataclass(frozen=True, slots=True)
class Audit:
    """Everything that a report may say. `requests` counts the trace's requests, `gates` are the user's limits."""

    manifest: Mapping[str, Any]
    arms: tuple[PlannedArm, ...]
    requests: int
    findings: tuple[Finding, ...]
    gates: Gates
    verdict: Verdict
    figures: tuple[Figure, ...]
    examples: tuple[Example, ...]
    comparisons: pa.Table
    summary: pa.Table


def analyse(run: RunTables, gates: Gates | None = None, provenance: ProvenanceOf | None = None) -> Audit:
    """The audit of a run.

    `provenance` looks up rows of that table (`Run.provenance`); without it the origins of damage are not shown.
    Raises RunError for tables or a manifest that are not this version's, UsageError for gates on a policy that the
    run does not have.
    """
    gates = gates or Gates()
    arms = tuple(run.arms())
    grid, overlap = _arranged(run, arms)
    pairs = compare(grid)
    figures = (*answer_figures(grid, pairs, overlap, _seed(run.manifest)), *cost_figures(grid))
    findings = find(grid, pairs, _max_noise(run.manifest), overlap)
    return Audit(
        manifest=run.manifest,
        arms=arms,
        requests=len(grid.request_ids),
        findings=findings,
        gates=gates,
        verdict=decide(findings, figures, gates),
        figures=figures,
        examples=worst_requests(grid, pairs, provenance),
        comparisons=comparisons_table(grid, pairs),
        summary=summary_table(figures),
    )


def section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the manifest; empty where it has none."""
    found = manifest.get(name)
    return found if isinstance(found, Mapping) else {}


def _arranged(run: RunTables, arms: Sequence[PlannedArm]) -> tuple[Grid, int]:
    """The observations by arm and request, and how far the stream's windows overlap. The tables can be freed then."""
    requests = conformed(run.table("requests"), "requests")
    return build_grid(run.table("observations"), requests, arms), stream_overlap(requests)


def _seed(manifest: Mapping[str, Any]) -> int:
    seed = section(manifest, "settings").get("seed")
    return seed if isinstance(seed, int) and seed >= 0 else 0


def _max_noise(manifest: Mapping[str, Any]) -> float:
    limit = section(manifest, "settings").get("max_noise")
    if limit is None:
        return MAX_NOISE
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit <= 1:
        raise RunError(f"the manifest's max_noise is {limit!r}, not a share from 0 to 1")
    return float(limit)
