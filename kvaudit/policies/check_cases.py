"""The requests on which a policy's contract is checked: prompt, deviations and k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvaudit.policies import BudgetContext, Need, Policy, SelectionContext, checked_budget
from kvaudit.policies.synthetic import ALL_NEEDS, make_context, make_prompt

Pattern = Callable[[int], NDArray[np.float64]]


def _repeated(*values: float) -> Pattern:
    return lambda count: np.resize(np.array(values), count)


DEVIATIONS: Mapping[str, Pattern] = {
    "no deviation": _repeated(0.0),
    "all equal": _repeated(0.1),
    "not a number": _repeated(np.nan),
    "some not a number": _repeated(1, np.nan, 2, 3, np.nan, np.nan, 0, 0),
    "infinite": _repeated(1, np.inf, 2, 3, np.inf, np.inf, 0, 0),
    "infinite and not a number": _repeated(np.nan, np.inf, np.nan, 3, np.inf, np.nan, 0, 0),
    "huge beside tiny": _repeated(1e-38, 3e38, 1e-38, 3e38, 1e-45, 0, 3e38, 1e-20),
}
LAYOUTS: Mapping[str, str] = {
    "one token": "d1",
    "one document": "d8",
    "missed documents": "i2- d3 d3- d5",
    "zeroed separators": "i2 s1 d2 s1 d1 s1",
    "separators only": "s3 g2 d4- s3",
    "a chat": "g1 m3 g1 m2 t1",
}
LONG = " ".join(["i60", *["s1 d88"] * 84, "q24-"])
"""The shape of the audited paper's prompts: 84 documents, about 7,500 tokens."""
_RANDOM_LAYOUTS = 40


@dataclass(frozen=True, slots=True)
class Case:
    """A request to check a policy on. A policy with a budget of its own is asked for that in place of `k`."""

    layout: str
    k: int
    shape: str = ""
    seed: int = 0

    def __str__(self) -> str:
        layout = self.layout if len(self.layout) <= 80 else f"{self.layout[:77]}..."
        return f'"{layout}", k = {self.k}' + (f" ({self.shape})" if self.shape else "")

    def context(self, policy: Policy, needs: frozenset[Need] = ALL_NEEDS) -> SelectionContext:
        prompt = make_prompt(self.layout, self.seed)
        count = len(prompt.positions)
        k = self.k
        if type(policy).budget is not Policy.budget:
            ratio = min(1.0, (k + 0.5) / count)
            k = checked_budget(policy, BudgetContext(count, ratio, prompt.segments, prompt.positions))
        pattern = DEVIATIONS.get(self.shape)
        even = {"no deviation": 0.0, "all equal": 0.5 / count}.get(self.shape)
        return make_context(
            self.layout,
            k,
            deviation=None if pattern is None else pattern(count),
            attention=None if even is None else np.full(count, even),
            seed=self.seed,
            needs=needs,
            policy=policy,
        )


def reusable(layout: str) -> int:
    return len(make_prompt(layout).positions)


@cache
def random_cases() -> tuple[Case, ...]:
    """Seeded prompts with all kinds of segments, missed ones among them; the smallest come first, with every k."""
    rng = np.random.default_rng(0)
    layouts = set[str]()
    while len(layouts) < _RANDOM_LAYOUTS:
        words = [
            f"{rng.choice(list('iddddmtqssg'))}{rng.integers(1, 7)}{'-' if rng.random() < 0.25 else ''}"
            for _ in range(rng.integers(1, 8))
        ]
        if any(not word.endswith("-") for word in words):
            layouts.add(" ".join(words))
    ordered = sorted(layouts, key=lambda layout: (reusable(layout), layout))
    return tuple(Case(layout, k, seed=seed) for seed, layout in enumerate(ordered) for k in _budgets(reusable(layout)))


def _budgets(count: int) -> list[int]:
    """Every k for a few tokens; for many, the least, the middle and the most."""
    return list(range(count + 1)) if count <= 6 else [0, 1, 2, count // 2, count - 1, count]


def extreme_cases() -> tuple[Case, ...]:
    """Every extreme shape with every k from 0 to N."""
    shapes = [*((name, layout) for name, layout in LAYOUTS.items()), *((name, "i2 d3 d3") for name in DEVIATIONS)]
    return tuple(Case(layout, k, name) for name, layout in shapes for k in range(reusable(layout) + 1))


def long_cases() -> tuple[Case, ...]:
    """More tokens than a byte counts, and than a policy may have tables for: few of them, all but one, and all."""
    count = reusable(LONG)
    return tuple(Case(LONG, k, "the prompt of 84 documents") for k in (count // 20, count - 1, count))
