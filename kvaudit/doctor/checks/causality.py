"""Do recomputed rows attend to later tokens? What comes after a row is exchanged, and the row is watched."""

from __future__ import annotations

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Chunk, Lab, SeenRows
from kvaudit.doctor.checks.measuring import distance

NAME = "causality"


def causality(lab: Lab) -> Finding:
    """One row in the middle of the first chunk is recomputed, each time over a cache that holds this very prompt and
    nothing else; then all tokens behind the row are others.

    It is the first chunk, so that no separator stands before the row: one that was stored behind later chunks would
    carry them. The control exchanges the tokens before the row, which must be seen in it.
    """
    half = lab.unit // 2
    before, row, behind, later = lab.chunk(half), lab.chunk(1), lab.chunk(half), lab.chunk()
    first = _watched(lab, ((*before, *row, *behind), later), half)
    other_behind = _watched(lab, ((*before, *row, *lab.chunk(half)), lab.chunk()), half)
    other_before = _watched(lab, ((*lab.chunk(half), *row, *behind), later), half)
    above = first.layer + 1
    states = first.states[above:]
    if not len(states):
        raise Inconclusive("rows are recomputed at the last layer alone, where none attends to another any more")
    seen, control = distance(states, other_behind.states[above:]), distance(states, other_before.states[above:])
    evidence = {"change by later tokens": seen, "change by earlier tokens": control, "noise": lab.scale.noise}
    if not lab.scale.plain(control):
        raise Inconclusive("the row did not change with what stands before it either", evidence)
    if lab.scale.differs("the change of a row by later tokens", seen):
        return Finding(NAME, "seen", "recomputed rows see later tokens", "--mask bottom-right", evidence)
    return Finding(NAME, "seen", "recomputed rows see no later token", "--mask exact", evidence)


def _watched(lab: Lab, chunks: tuple[Chunk, Chunk], index: int) -> SeenRows:
    """A row of the first chunk, recomputed in a prompt that was stored as it stands."""
    lab.reset()
    lab.store(*chunks)
    row = lab.at(chunks, 0)[index]
    return lab.rows(*chunks, at=(row,), recompute=(row,))
