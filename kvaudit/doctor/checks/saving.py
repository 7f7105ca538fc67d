"""Is a new chunk ever not stored?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Lab

NAME = "save loss"

COLD, BEHIND = "in new prompts", "behind a hit"
PLACES = (COLD, BEHIND)

REPEATS = 2
"""Every length is tried so often, so that a cache that drops every second write is seen whichever it begins with."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A new chunk behind another, which is new too or was stored before."""

    place: str
    lead_tokens: int
    tokens: int


def save_loss(lab: Lab) -> Finding:
    """New chunks of several lengths, in prompts of new chunks and behind one that is reused; each prompt is then
    served again with another query. A chunk is lost where it is not reused then, while others in such a place are,
    which is the control.
    """
    trials = list(_trials(lab))
    kept = [_is_kept(lab, trial) for trial in trials]
    lost = [trial for trial, is_kept in zip(trials, kept, strict=True) if not is_kept]
    evidence: dict[str, float] = {}
    for place in PLACES:
        evidence[f"tried {place}"] = sum(trial.place == place for trial in trials)
        evidence[f"lost {place}"] = sum(trial.place == place for trial in lost)
    if len(lost) == len(trials):
        raise Inconclusive("no chunk behind another was ever reused", evidence)
    if not lost:
        return Finding(NAME, "seen", "every new chunk was stored", evidence=evidence)
    evidence["tokens of the longest lost"] = longest = max(trial.tokens for trial in lost)
    where = " and ".join(place for place in PLACES if any(trial.place == place for trial in lost))
    return Finding(NAME, "seen", f"new chunks of up to {longest} tokens are lost {where}", evidence=evidence)


def _trials(lab: Lab) -> Iterator[Trial]:
    """Two lengths of the lead, so that what is new does not always begin at the same place of an engine's blocks."""
    lengths = sorted({1, max(1, lab.smallest // 2), lab.smallest, lab.unit, 2 * lab.unit})
    for place in PLACES:
        for lead_tokens in (lab.unit, lab.unit + lab.unit // 4 + 1)[:REPEATS]:
            for tokens in lengths:
                yield Trial(place, lead_tokens, tokens)


def _is_kept(lab: Lab, trial: Trial) -> bool:
    lead, new = lab.chunk(trial.lead_tokens), lab.chunk(trial.tokens)
    served = []
    if trial.place == BEHIND:
        served.append(lab.store(lead))
        served.append(lab.serve(lead, new))
        if 0 not in served[-1].hits:
            return False
    else:
        served.append(lab.store(lead, new))
    again = lab.serve(lead, new)
    if any(seen.served.evictions for seen in (*served, again)):
        raise Inconclusive("the cache is so small that entries were evicted")
    return 1 in again.hits
