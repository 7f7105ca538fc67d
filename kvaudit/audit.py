"""From a run's tables to an audit: comparisons, figures, findings, verdict. Pure: the store reads and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from kvaudit.checks import MAX_NOISE
from kvaudit.compare import PlannedArm, build_grid, compare, comparisons_table, conformed
from kvaudit.costs import cost_figures
from kvaudit.errors import RunError
from kvaudit.examples import Example, ProvenanceOf, worst_requests
from kvaudit.figures import Figure, answer_figures, summary_table
from kvaudit.verdict import Finding, Gates, Verdict, decide, find


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

    `provenance` looks up rows of that table; without it the whole table is read and filtered. Raises RunError for
    tables or a manifest that are not this version's, UsageError for gates on a policy that the run does not have.
    """
    gates = gates or Gates()
    arms = tuple(run.arms())
    requests = conformed(run.table("requests"), "requests")
    grid = build_grid(run.table("observations"), requests, arms)
    pairs = compare(grid)
    figures = (*answer_figures(grid, pairs, requests, _seed(run.manifest)), *cost_figures(grid))
    findings = find(grid, pairs, figures, _max_noise(run.manifest))
    return Audit(
        manifest=run.manifest,
        arms=arms,
        requests=len(grid.request_ids),
        findings=findings,
        gates=gates,
        verdict=decide(findings, figures, gates),
        figures=figures,
        examples=worst_requests(grid, pairs, provenance or _looked_up_in(run)),
        comparisons=comparisons_table(grid, pairs),
        summary=summary_table(figures),
    )


def section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the manifest; empty where it has none."""
    found = manifest.get(name)
    return found if isinstance(found, Mapping) else {}


def _seed(manifest: Mapping[str, Any]) -> int:
    seed = section(manifest, "settings").get("seed")
    return seed if isinstance(seed, int) and seed >= 0 else 0


def _max_noise(manifest: Mapping[str, Any]) -> float:
    limit = section(manifest, "analysis").get("max_noise", section(manifest, "settings").get("max_noise"))
    if limit is None:
        return MAX_NOISE
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit <= 1:
        raise RunError(f"the manifest's max_noise is {limit!r}, not a share from 0 to 1")
    return float(limit)


def _looked_up_in(run: RunTables) -> ProvenanceOf:
    def rows(arm_ids: Sequence[str], request_ids: Sequence[str]) -> pa.Table:
        table = conformed(run.table("provenance"), "provenance")
        wanted = pc.and_(
            pc.is_in(table["arm_id"], value_set=pa.array(arm_ids, pa.string())),
            pc.is_in(table["request_id"], value_set=pa.array(request_ids, pa.string())),
        )
        return table.filter(wanted)

    return rows
