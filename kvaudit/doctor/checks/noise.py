"""How far an engine's repeats are apart: in one launch, in two, and rows computed again from rows that were stored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvaudit.doctor.checks.findings import Finding, Inconclusive
from kvaudit.doctor.checks.lab import Chunk, Lab, SeenRows
from kvaudit.doctor.checks.measuring import ROUNDING, distance
from kvaudit.policies import Floats
from kvaudit.records import Reference

NAME = "noise"


@dataclass(frozen=True, slots=True)
class Take:
    """One run of the same prompts from an empty cache: a full prefill's answer, the answers of requests that may reuse,
    and, where rows are reused and recomputed, these rows [L, P, G, 2 D]. `rounding`: how far keys and values that are
    computed again in the same context are from those that were stored, relative. `unseen`: why there are no rows.
    """

    reference: Reference
    answers: tuple[tuple[int, ...], ...]
    states: tuple[Floats, ...] = ()
    rounding: float = 0.0
    unseen: str | None = None

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return self.reference.generated_ids, *self.answers


def take(lab: Lab) -> Take:
    lead, second = lab.chunk(), lab.chunk()
    reference = lab.full_prefill(lead, second)
    lab.store(lead, second)
    answers = [lab.serve(lead, second).served.answer_ids]
    try:
        loaded, computed, rounding = _rows(lab, lead, second)
    except Inconclusive as end:
        return Take(reference, tuple(answers), unseen=end.reason)
    answers += [seen.served.answer_ids for seen in (loaded, computed)]
    return Take(reference, tuple(answers), (loaded.states, computed.states), rounding)


def _rows(lab: Lab, lead: Chunk, second: Chunk) -> tuple[SeenRows, SeenRows, float]:
    """Rows with the first chunk as it is loaded, and as it is computed again, and how far these are apart.

    The first chunk has no context, so that it is computed again as it was, whatever the engine's discipline: at the
    layer from which rows are recomputed nothing but rounding can change them.
    """
    first = lab.at((lead, second), 0)
    at = [*first, *lab.at((lead, second), 1)]
    loaded = lab.rows(lead, second, at=at, recompute=first[-1:])
    computed = lab.rows(lead, second, at=at, recompute=first)
    rows, layer = slice(0, len(first) - 1), slice(computed.layer, computed.layer + 1)
    return loaded, computed, distance(loaded.states[layer, rows], computed.states[layer, rows])


@dataclass(frozen=True, slots=True)
class Noise:
    """Takes of the first launch, at least two, and those of later launches."""

    first_launch: tuple[Take, ...]
    later: tuple[Take, ...]

    @property
    def relative(self) -> float | None:
        """The largest relative difference of rows where nothing differs; None where no run showed rows."""
        first, *others = self._takes
        if not any(taken.states for taken in self._takes):
            return None
        return max([ROUNDING, *(rows_apart(first, other) for other in others), *(t.rounding for t in self._takes)])

    def finding(self) -> Finding:
        first, *repeats = self.first_launch
        relative = self.relative
        evidence: dict[str, float] = {}
        if relative is not None:
            evidence |= {"relative": relative, "rounding": max(t.rounding for t in self._takes)}
        for name, takes in (("repeat", tuple(repeats)), ("launch", self.later)):
            if relative is not None:
                evidence[f"{name}: rows"] = max(rows_apart(first, other) for other in takes)
            evidence |= _largest(name, [logprobs_apart(first.reference, other.reference) for other in takes])
        others = (*repeats, *self.later)
        evidence["tokens differ"] = sum(other.tokens != first.tokens for other in others)
        if evidence["tokens differ"]:
            return Finding(NAME, "seen", "tokens differ between repeats", evidence=evidence)
        if relative is None:
            reason = f"tokens are the same, and no rows can be compared: {first.unseen}"
            return Finding(NAME, "inconclusive", evidence=evidence, reason=reason)
        exact = all(_same_bits(first, other) for other in others)
        value = "repeats and launches are equal bit for bit" if exact else "the same tokens, other last digits"
        return Finding(NAME, "seen", value, evidence=evidence)

    @property
    def _takes(self) -> tuple[Take, ...]:
        return *self.first_launch, *self.later


def rows_apart(left: Take, right: Take) -> float:
    """Infinite where one run reused and the other did not."""
    if len(left.states) != len(right.states):
        return float("inf")
    return max((distance(a, b) for a, b in zip(left.states, right.states, strict=True)), default=0.0)


def logprobs_apart(left: Reference, right: Reference) -> float | None:
    """The largest difference of log-probabilities in nats, over tokens that both show, up to the first step at which
    the answers part; None where an engine shows none."""
    largest = None
    for index, (ids, logprobs) in enumerate(zip(left.top_ids, left.top_logprobs, strict=True)):
        if index >= len(right.top_ids) or left.generated_ids[:index] != right.generated_ids[:index]:
            break
        _, at, other = np.intersect1d(ids, right.top_ids[index], return_indices=True)
        apart = np.abs(np.asarray(logprobs)[at] - np.asarray(right.top_logprobs[index])[other])
        largest = max(largest or 0.0, float(apart.max(initial=0.0)))
    return largest


def _largest(name: str, apart: list[float | None]) -> dict[str, float]:
    shown = [difference for difference in apart if difference is not None]
    return {f"{name}: log-probabilities": max(shown)} if shown else {}


def _same_bits(left: Take, right: Take) -> bool:
    return not rows_apart(left, right) and logprobs_apart(left.reference, right.reference) in (0.0, None)
