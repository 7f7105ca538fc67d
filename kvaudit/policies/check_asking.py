"""Asking a policy as an engine does, and seeing what it did: for the checks of its contract."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np

from kvaudit.errors import PolicyError
from kvaudit.policies import Policy, SelectionContext, checked_schedule, checked_selection
from kvaudit.policies.check_cases import Case
from kvaudit.policies.synthetic import SyntheticSignals

_STATE = (bool, int, float, str, bytes, tuple, list, dict, set, deque, np.ndarray, type(None))


class ContractError(Exception):
    """A check saw what must not be."""


@dataclass(frozen=True)
class Recording:
    """Signals that remember what they were asked for, by the name of the need."""

    signals: Any
    asked: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name.replace("_", "-"))
        return getattr(self.signals, name)

    def at(self, *place: Any) -> Recording:
        return Recording(self.signals.at(*place), self.asked)


@dataclass(frozen=True)
class _Answered:
    """What a policy returned, in the place of the policy, so that it is asked once."""

    name: str
    returned: object

    def select(self, context: SelectionContext) -> object:
        return self.returned


def selected(policy: Policy, context: SelectionContext) -> list[int]:
    """What it chooses, ascending; with a schedule, layer by layer as an engine asks for it, one after another."""
    layers = context.layers - context.layer
    counts = checked_schedule(policy, context.k, len(context.positions), layers)
    if counts is None:
        return _selected_once(policy, context)
    chosen: list[int] = []
    for layer, count in enumerate(counts, context.layer):
        if count < len(context.positions):
            here = cast(SyntheticSignals, context.signals).at(layer, np.ones(len(context.positions), dtype=bool))
            context = replace(context, layer=layer, k=count, signals=here)
            selected = _selected_once(policy, context)
            kept = np.isin(context.positions, selected)
            context = replace(context, positions=context.positions[kept], signals=here.at(layer, kept))
            chosen += selected
    return chosen


def _selected_once(policy: Policy, context: SelectionContext) -> list[int]:
    returned = policy.select(context)
    try:
        chosen = checked_selection(cast(Policy, _Answered(policy.name, returned)), context)
    except PolicyError as error:
        what = error.message.removeprefix(f"policy {policy.name!r} ").removesuffix(
            f" for request {context.request_id!r}"
        )
        raise ContractError(f"{what}; it was {shown(returned)}") from error
    positions: list[int] = chosen.tolist()
    return positions


def milliseconds(policy: Policy, case: Case) -> float:
    """The median of up to five selections, after a first one that is only counted where it took long."""
    context, took = case.context(policy), list[float]()
    for _ in range(6):
        start = perf_counter()
        policy.select(context)
        took.append(1000 * (perf_counter() - start))
        if took[0] > 1000:
            return took[0]
    return median(took[1:])


def arrays(context: SelectionContext) -> dict[str, Any]:
    signals = cast(SyntheticSignals, context.signals)
    return {
        "positions": context.positions,
        "token ids": context.token_ids,
        "key deviation": signals.keys,
        "value deviation": signals.values,
        "query attention": signals.queries,
        "auxiliary attention": signals.auxiliary,
        "written attention": signals.written.outside,
    }


def kept_state(policy: type[Policy]) -> dict[str, str]:
    """What a policy's classes and their modules hold that could be state, as text; kvaudit's contract left out."""
    classes = [one for one in policy.__mro__ if issubclass(one, Policy) and one is not Policy]
    places: dict[str, Mapping[str, Any]] = {one.__qualname__: vars(one) for one in classes}
    places |= {name: vars(sys.modules[name]) for name in {one.__module__ for one in classes} if name in sys.modules}
    return {
        name if place.startswith("_kvaudit_policy_") else f"{place}.{name}": repr(value)
        for place, held in places.items()
        for name, value in list(held.items())
        if not name.startswith("__") and isinstance(value, _STATE)
    }


def shown(returned: object) -> str:
    text = " ".join(str(returned.tolist() if isinstance(returned, np.ndarray) else returned).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
