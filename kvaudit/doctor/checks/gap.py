"""What stands in the cache between chunks: zeros, what was stored, or what was computed in place?"""

from __future__ import annotations

import numpy as np

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Chunk, Lab, SeenRows
from kvaudit.doctor.checks.measuring import distance
from kvaudit.policies import Floats

NAME = "gap"
STORED = "separators are stored and reused"


def gap(lab: Lab) -> Finding:
    """Two separators of equal tokens, each between chunks that are reused, side by side.

    Their values are equal where one stored entry serves both, and differ where each was computed in its place. That a
    value depends on what stands before it is the control; that the chunks' rows are not zero is that for zeros.
    """
    chunks = lead, first, second = lab.chunk(), lab.chunk(), lab.chunk()
    lab.store(*chunks)
    one, other, inside = lab.gap_after(chunks, 0), lab.gap_after(chunks, 1), lab.at(chunks, 1)
    seen = lab.rows(*chunks, at=[*one, *other, *inside])
    layer, width = seen.layer, lab.gap_tokens
    values = seen.rows.values[layer:]
    apart = distance(values[:, :width], values[:, width : 2 * width])
    evidence = {"values of two separators apart": apart, "noise": lab.scale.noise}
    zero = []
    for what, states in (("keys", seen.rows.keys[layer:]), ("values", values)):
        evidence[f"size of {what}"] = size = _size(states[:, : 2 * width]) / _size(states[:, 2 * width :])
        zero.append(not lab.scale.differs(f"the size of separators' {what}", size))
    if any(zero):
        if all(zero):
            return Finding(NAME, "seen", "separators are zero", "--gap zero", evidence)
        told = "keys are zero, their values are not" if zero[0] else "values are zero, their keys are not"
        return Finding(NAME, "seen", f"separators' {told}", evidence=evidence)
    if {0, 1} <= seen.stored_gaps:
        return Finding(NAME, "seen", STORED, "--gap store", evidence)
    if lab.scale.differs("the difference of two separators", apart):
        return Finding(NAME, "seen", "separators are computed in place", "--gap recompute", evidence)
    evidence["change of values by context"] = _context(lab, (lead, first, second), seen, layer)
    if not lab.scale.plain(evidence["change of values by context"]):
        raise Inconclusive("what stands before a token does not show in its value", evidence)
    return Finding(NAME, "seen", STORED, "--gap store", evidence)


def _context(lab: Lab, chunks: tuple[Chunk, Chunk, Chunk], seen: SeenRows, layer: int) -> float:
    """How much the values of a chunk's rows change when they are computed behind another chunk."""
    _, first, second = chunks
    elsewhere = lab.chunk()
    lab.store(elsewhere)
    moved = (elsewhere, first, second)
    rows = lab.at(moved, 1)
    computed = lab.rows(*moved, at=rows, recompute=rows)
    return distance(seen.rows.values[layer:, 2 * lab.gap_tokens :], computed.rows.values[layer:])


def _size(states: Floats) -> float:
    """The largest, over layers and rows, of the rows' L2 norms."""
    rows = states.reshape(*states.shape[:2], -1).astype(np.float64)
    return float(np.linalg.norm(rows, axis=-1).max())
