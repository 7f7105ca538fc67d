"""What is in the cache once a chunk was computed in several contexts: who wins?"""

from __future__ import annotations

import numpy as np

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Chunk, Lab
from kvaudit.doctor.checks.measuring import distance
from kvaudit.policies import Floats

NAME = "discipline"


def discipline(lab: Lab) -> Finding:
    """A chunk is written behind one chunk, then recomputed as a whole behind another, then looked at behind both.

    Only values are compared, which no move changes. The control is that the other context shows in them. Whether the
    context of the writer shows at all is told by writing the chunk behind another one, in an emptied cache.
    """
    home, away, chunk = (lab.chunk() for _ in range(3))
    first = lab.store(home, chunk)
    again = lab.serve(home, chunk)
    if not again.served.reused_tokens and not first.served.writes and not again.served.writes:
        return Finding(NAME, "seen", "nothing is stored", "--write-back none", {"reused": 0, "written": 0})
    again.require_hits(range(2))
    lab.store(away)
    if (own_context := _own_context(lab, home, chunk)) is not None:
        return own_context
    at = lab.at((home, chunk), 1)
    written = lab.rows(home, chunk, at=at)
    recomputed = lab.rows(away, chunk, at=at, recompute=at)
    at_home, abroad = lab.rows(home, chunk, at=at), lab.rows(away, chunk, at=at)
    layer = recomputed.layer
    before, after = written.rows.values[layer:], recomputed.rows.values[layer:]
    evidence = {"context": distance(before, after), "noise": lab.scale.noise}
    if not lab.scale.plain(evidence["context"]):
        raise Inconclusive("what stands before the chunk does not show in its values", evidence)
    finding = [_whose(lab, seen.rows.values[layer:], before, after) for seen in (at_home, abroad)]
    if finding == ["recomputed", "recomputed"]:
        return Finding(NAME, "seen", "the last writer wins", "--write-back last-writer", evidence)
    if finding == ["written", "recomputed"]:
        return Finding(NAME, "seen", "each context has its own version", "--write-back versions", evidence)
    if finding != ["written", "written"]:
        raise Inconclusive("what is loaded is neither what was written first nor what was computed last", evidence)
    return _first_or_isolated(lab, away, chunk, before, layer, evidence)


def _own_context(lab: Lab, home: Chunk, chunk: Chunk) -> Finding | None:
    """A chunk that is reused behind no other tokens than those behind which it was written."""
    elsewhere = lab.chunk()
    lab.store(elsewhere)
    once, twice = lab.serve(elsewhere, chunk), lab.serve(elsewhere, chunk)
    twice.require_hits(range(2))
    if 1 in once.hits:
        return None
    evidence = {"reused in another context": 0, "reused in its own": 1}
    return Finding(
        NAME, "seen", "an entry is used only in the context that wrote it", "--write-back versioned", evidence
    )


def _whose(lab: Lab, now: Floats, written: Floats, recomputed: Floats) -> str:
    """Whose values are loaded."""
    if not lab.scale.differs("the difference from what was written first", distance(written, now)):
        return "written"
    if not lab.scale.differs("the difference from what was computed last", distance(recomputed, now)):
        return "recomputed"
    return "neither"


def _first_or_isolated(
    lab: Lab, away: Chunk, chunk: Chunk, before: np.ndarray, layer: int, evidence: dict[str, float]
) -> Finding:
    lab.reset()
    lab.store(away, chunk)
    at = lab.at((away, chunk), 1)
    evidence["writer's context"] = distance(before, lab.rows(away, chunk, at=at).rows.values[layer:])
    if lab.scale.differs("what the writer's context changes", evidence["writer's context"]):
        return Finding(NAME, "seen", "the first writer wins", "--write-back first-writer", evidence)
    return Finding(NAME, "seen", "chunks are computed alone", "--write-back isolated", evidence)
