"""What became of every answer from one deployment to another, and what their own noise could explain (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvaudit.analysis.stats import Estimate, wilson

Became = Literal["same", "changed", "noisy", "empty", "failed"]
"""`noisy`: one of the deployments did not give its own answer again. `empty`: both said nothing each time.
`failed`: both refused the request each time; what one alone refuses has changed."""
Change = Literal["same", "changed", "inconclusive"]
MOST_LEFT_OUT = 0.5
"""Where a larger share of the requests is not compared, nothing is said of most of them."""


@dataclass(frozen=True, slots=True)
class Told:
    """An answer. `token_ids` are empty where the server shows none; `error` says why there is no answer."""

    text: str
    token_ids: tuple[int, ...] = ()
    error: str | None = None

    def equals(self, other: Told) -> bool:
        if self.error or other.error:
            return bool(self.error and other.error)
        by_ids = bool(self.token_ids and other.token_ids)
        return self.text == other.text and (not by_ids or self.token_ids == other.token_ids)


@dataclass(frozen=True, slots=True)
class Compared:
    """One request: what each deployment answered, pass by pass."""

    request_id: str
    before: tuple[Told, ...]
    after: tuple[Told, ...]

    @property
    def became(self) -> Became:
        everything = (*self.before, *self.after)
        if all(told.error for told in everything):
            return "failed"
        if not any(told.text or told.error for told in everything):
            return "empty"
        if not (is_steady(self.before) and is_steady(self.after)):
            return "noisy"
        return "same" if self.before[0].equals(self.after[0]) else "changed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`answered`: requests that not both refused each time. `empty`: those of them to which both said nothing.
    `steady`: those of the others to which each deployment gives its own answer again; `changed`: the steady ones that
    changed, of which one deployment alone refuses `refused`. `share` is that of the steady, `noise_before` and
    `noise_after` are shares of the answered; None where there are none.
    """

    requests: int
    answered: int
    empty: int
    steady: int
    changed: tuple[str, ...]
    refused: int
    share: Estimate | None
    noise_before: Estimate | None
    noise_after: Estimate | None

    @property
    def explained(self) -> float:
        """The share of answers that noise could change by luck: the worse upper bound where there is any.

        An answer that varies can come out alike twice in each deployment, and differ between them.
        """
        known = [noise for noise in (self.noise_before, self.noise_after) if noise is not None and noise.value]
        return max((noise.high or 0.0 for noise in known), default=0.0)

    @property
    def change(self) -> Change:
        """Changes beyond the noise are seen however few requests were compared; that nothing changed is not."""
        if self.changed:
            return "changed" if len(self.changed) / self.answered > self.explained else "inconclusive"
        return "same" if self.is_compared else "inconclusive"

    @property
    def is_compared(self) -> bool:
        return self.steady > 0 and self.requests - self.steady <= MOST_LEFT_OUT * self.requests


def outcome(rows: Sequence[Compared]) -> Outcome:
    answered = [row for row in rows if row.became != "failed"]
    steady = [row for row in answered if row.became in ("same", "changed")]
    changed = tuple(row.request_id for row in steady if row.became == "changed")
    return Outcome(
        requests=len(rows),
        answered=len(answered),
        empty=sum(row.became == "empty" for row in answered),
        steady=len(steady),
        changed=changed,
        refused=sum(row.before[0].error != row.after[0].error for row in steady if row.became == "changed"),
        share=wilson(len(changed), len(steady)),
        noise_before=_noise(answered, lambda row: row.before),
        noise_after=_noise(answered, lambda row: row.after),
    )


def is_steady(answers: Sequence[Told]) -> bool:
    """Whether a deployment gave the same answer each time."""
    return all(answers[0].equals(other) for other in answers[1:])


def _noise(rows: Sequence[Compared], answers: Callable[[Compared], Sequence[Told]]) -> Estimate | None:
    return wilson(sum(not is_steady(answers(row)) for row in rows), len(rows))
