"""What a check saw of an engine: evidence is data, words come with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["seen", "inconclusive", "failed"]


class Inconclusive(Exception):  # noqa: N818 - no error: the engine could not be brought into the state that is needed
    """Ends a check that cannot see, with the reason and what was measured until then."""

    def __init__(self, reason: str, evidence: Mapping[str, float] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.evidence = dict(evidence or {})


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result.

    value: what the engine does, in a few words; None where that was not seen. switch: the switch of the embedded engine
    that does the same, as an option of `kvaudit replay`; None where there is none.
    evidence: what was measured. Differences of keys and values are relative: the L2 norm of the difference over that of
    the rows, the largest over the layers that tell.
    reason: why the check is inconclusive (the engine could not be brought into the state that it needs), or how it
    failed.
    """

    check: str
    outcome: Outcome
    value: str | None = None
    switch: str | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None
