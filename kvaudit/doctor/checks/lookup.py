"""Does a miss hide later hits?"""

from __future__ import annotations

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Lab

NAME = "lookup"


def lookup(lab: Lab) -> Finding:
    """Three chunks are stored; the middle one is then exchanged for one that is new.

    Two controls: the three are reused together, and the last is reused where the middle one is left out, so that it is
    not the other context that hides it.
    """
    lead, middle, last, new = (lab.chunk() for _ in range(4))
    lab.store(lead, middle, last)
    lab.serve(lead, middle, last).require_hits(range(3))
    if 1 not in lab.serve(lead, last).hits:
        raise Inconclusive(
            "a chunk is reused only behind the tokens that it was written behind, so that none can be missed"
        )
    seen = lab.serve(lead, new, last)
    seen.require_hits([0])
    if 1 in seen.hits:
        raise Inconclusive("the engine says that it reused a chunk that nobody had stored")
    evidence = {"chunks behind the miss": 1, "reused behind the miss": int(2 in seen.hits)}
    if 2 in seen.hits:
        return Finding(NAME, "seen", "chunks behind a miss are reused", "--lookup any", evidence)
    return Finding(NAME, "seen", "a miss hides later hits", "--lookup stop-at-miss", evidence)
