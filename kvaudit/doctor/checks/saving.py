"""Is a new chunk ever not stored?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Lab

NAME = "save loss"

COLD, BEHIND = "in new prompts", "behind a hit"
PLACES = (COLD, BEHIND)


@dataclass(frozen=True, slots=True)
class Case:
    """A new chunk behind another, which is new too or was stored before."""

    place: str
    lead_tokens: int
    tokens: int


def save_loss(lab: Lab) -> Finding:
    """New chunks of several lengths, in prompts of new chunks and behind one that is reused; each prompt is then
    served again with another query. A chunk is lost where it is not reused then, while others in such a place are,
    which is the control. Where the one before it is not reused there was no hit to stand behind, and nothing is said.
    """
    kept = {case: _is_kept(lab, case) for case in _cases(lab)}
    tried = [case for case, is_kept in kept.items() if is_kept is not None]
    lost = [case for case in tried if not kept[case]]
    evidence: dict[str, float] = {}
    for place in PLACES:
        evidence[f"tried {place}"] = sum(case.place == place for case in tried)
        evidence[f"lost {place}"] = sum(case.place == place for case in lost)
    if without_hit := len(kept) - len(tried):
        evidence["no hit to stand behind"] = without_hit
    if len(lost) == len(tried):
        raise Inconclusive("no chunk behind another was ever reused", evidence)
    if not evidence[f"tried {BEHIND}"]:
        raise Inconclusive("no chunk was reused that a new one could stand behind", evidence)
    if not lost:
        return Finding(NAME, "seen", "every new chunk was stored", evidence=evidence)
    evidence["tokens of the longest lost"] = longest = max(case.tokens for case in lost)
    where = " and ".join(place for place in PLACES if any(case.place == place for case in lost))
    tokens, longest_tried = "token" if longest == 1 else "tokens", max(case.tokens for case in tried)
    lengths = f"{longest} {tokens}, of 1 to {longest_tried} that were tried,"
    return Finding(NAME, "seen", f"new chunks of up to {lengths} are lost {where}", evidence=evidence)


def _cases(lab: Lab) -> Iterator[Case]:
    """Two lengths of the lead, so that what is new does not always begin at the same place of an engine's blocks, and
    a cache that drops every second write is seen whichever it begins with."""
    lengths = sorted({1, max(1, lab.smallest // 2), lab.smallest, lab.unit, 2 * lab.unit})
    for place in PLACES:
        for lead_tokens in (lab.unit, lab.unit + lab.unit // 4 + 1):
            for tokens in lengths:
                yield Case(place, lead_tokens, tokens)


def _is_kept(lab: Lab, case: Case) -> bool | None:
    """None where there was no hit to stand behind."""
    lead, new = lab.chunk(case.lead_tokens), lab.chunk(case.tokens)
    served = []
    if case.place == BEHIND:
        served.append(lab.store(lead))
        served.append(lab.serve(lead, new))
        if 0 not in served[-1].hits:
            return None
    else:
        served.append(lab.store(lead, new))
    again = lab.serve(lead, new)
    if any(seen.evicts_chunks for seen in (*served, again)):
        raise Inconclusive("the cache is so small that entries were evicted")
    return 1 in again.hits
