"""Which cells a study has, how they are called, and which of them give the same result as another (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Literal, get_args

from kvaudit.engines import PREFIX_LOOKUPS, EngineSettings, Gap, Lookup, Mask, Switches, WriteBack, check_switches
from kvaudit.errors import UsageError

Kind = Literal["policies", "disciplines", "budgets", "switches"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Values = tuple[float | str, ...]

BUDGETS = (0.01, 0.02, 0.05, 0.10, 0.15, 0.20, 0.50)
"""Recompute ratios of a study of budgets."""
RATIO = "recompute_ratio"
AXES = (RATIO, "mask", "gap", "lookup", "write_back")
"""What cells of a study can differ in, in the order in which names and tables give it."""
RATIO_FREE = frozenset({"none", "all"})
"""Policies whose budget does not read the recompute ratio: 0 tokens, and all of them (`kvaudit.policies.bounds`). The
ratio acts through the budget alone, so that every arm of theirs is the same at every ratio."""
COSTLY = frozenset({"oracle"})
"""Policies that serve a request many times over: a study of policies has them only where they are named."""
REASONED = "embedded"
"""The engine whose switches' meaning `canonical` knows."""

_VARIED: Mapping[Kind, Mapping[str, Values]] = MappingProxyType(
    {
        "policies": {},
        "disciplines": {"write_back": get_args(WriteBack), "lookup": get_args(Lookup)},
        "budgets": {RATIO: BUDGETS},
        "switches": {
            "mask": get_args(Mask),
            "gap": get_args(Gap),
            "lookup": tuple(lookup for lookup in get_args(Lookup) if lookup not in PREFIX_LOOKUPS),
            "write_back": ("first-writer", "isolated"),
        },
    }
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One audit of a study; its policies are arms of the same run."""

    name: str
    recompute_ratio: float
    switches: Switches
    policies: tuple[str, ...]

    def value(self, axis: str) -> float | str:
        """What the cell has on an axis of `AXES`."""
        found: float | str = self.recompute_ratio if axis == RATIO else getattr(self.switches, axis)
        return found

    @property
    def is_control(self) -> bool:
        """Whether nothing is ever reused here, by design: the audit of such a cell proves the engine, not a policy."""
        return self.switches.write_back == "none"


@dataclass(frozen=True, slots=True)
class Same:
    """Work that is not done, because `cell` gives the same result: all of cell `name`, or `policies` in it."""

    name: str
    policies: tuple[str, ...]
    cell: str
    why: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """A combination that means nothing, or that the engine refuses, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class StudyGrid:
    """`axes` are those in which cells differ, each with its values in order."""

    kind: Kind
    axes: Mapping[str, Values]
    cells: tuple[Cell, ...]
    same: tuple[Same, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass
class _Collected:
    cells: dict[tuple[float, Switches], Cell] = field(default_factory=dict)
    with_all: dict[Switches, str] = field(default_factory=dict)
    same: list[Same] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def make_grid(
    kind: Kind, engine: str, settings: EngineSettings, policies: Sequence[str], fixed: frozenset[str] = frozenset()
) -> StudyGrid:
    """The cells of a study. `fixed` names axes that stay as they are in `settings`.

    Raises UsageError when there is no policy, and when no combination means anything.
    """
    policies = tuple(dict.fromkeys(policies))
    if not policies:
        raise UsageError("no policy is left to study", "name one with --policy")
    axes = {axis: _VARIED[kind][axis] for axis in AXES if axis in _VARIED[kind] and axis not in fixed}
    found = _Collected()
    for ratio, switches in _combinations(settings, axes, fixed):
        name = _name(axes, ratio, switches)
        try:
            check_switches(switches)
        except UsageError as error:
            found.skipped.append(Skipped(name, error.message))
            continue
        _add(found, engine, Cell(name, ratio, switches, policies))
    if not found.cells:
        raise UsageError(f"a study of {kind} has no cell here: {found.skipped[0].why}", "leave that switch out")
    return StudyGrid(kind, axes, tuple(found.cells.values()), tuple(found.same), tuple(found.skipped))


def canonical(engine: str, switches: Switches) -> tuple[Switches, str]:
    """The same switches for all combinations that give the same result, and why they do.

    Only for the embedded engine, from how it computes (its `lookup` and `blend` modules):

    - Nothing is written back: the cache is empty for ever, so that no chunk is found under any lookup, no token is
      reusable, and no row is computed over a mixed cache. Mask, gap and lookup have nothing to act on.
    - Chunks are computed alone: a chunk that is not there yet is computed when it is looked for. No lookup misses, so
      none stops at a miss.
    - Entries are used in the context that wrote them alone, with a mask or with gaps that change what stands after
      them: every lookup ends at the first segment that is not used, the one that stops at a miss too.
    """
    if engine == REASONED and switches.write_back == "none":
        blank = replace(switches, mask="exact", gap="recompute", lookup="any")
        return blank, "nothing is ever in the cache, so that mask, gap and lookup have nothing to act on"
    if engine == REASONED and switches.write_back == "isolated":
        return replace(switches, lookup="any"), "chunks computed alone are never missed, so that no lookup stops"
    ends_anyway = switches.mask == "bottom-right" or switches.gap == "zero"
    if engine == REASONED and switches.write_back == "versioned" and ends_anyway:
        return replace(switches, lookup="any"), "there every lookup ends at the first segment that is not used"
    return switches, ""


def leaves_no_choice(engine: str, switches: Switches) -> bool:
    """Whether no token is ever reusable by a policy, so that every policy gives the same result: the embedded engine
    with an exact prefix cache (`PREFIX_LOOKUPS`: N = 0), or with nothing in its cache."""
    return engine == REASONED and (switches.lookup in PREFIX_LOOKUPS or switches.write_back == "none")


def _add(found: _Collected, engine: str, cell: Cell) -> None:
    """The cell, without what another one shows already."""
    stands_for, why = canonical(engine, cell.switches)
    twin = found.cells.get((cell.recompute_ratio, stands_for))
    if twin is not None:
        found.same.append(Same(cell.name, (), twin.name, why))
        return
    policies = cell.policies
    if stands_for in found.with_all:
        why = "their budget does not depend on the recompute ratio"
        policies = _left_out(found, cell.name, policies, RATIO_FREE, found.with_all[stands_for], why)
    if len(policies) > 1 and leaves_no_choice(engine, cell.switches):
        why = f"no token is left to a policy: {policies[0]} stands for all"
        policies = _left_out(found, cell.name, policies, frozenset(policies[1:]), cell.name, why)
    if policies:
        found.cells[cell.recompute_ratio, stands_for] = replace(cell, policies=policies)
        found.with_all.setdefault(stands_for, cell.name)


def _left_out(
    found: _Collected, name: str, policies: tuple[str, ...], out: frozenset[str], cell: str, why: str
) -> tuple[str, ...]:
    gone = tuple(policy for policy in policies if policy in out)
    if gone:
        found.same.append(Same(name, gone, cell, why))
    return tuple(policy for policy in policies if policy not in out)


def _combinations(
    settings: EngineSettings, axes: Mapping[str, Values], fixed: frozenset[str]
) -> Iterator[tuple[float, Switches]]:
    """An exact prefix cache has no mask and no gap of its own: where a study looks up prefixes, those are exact."""
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        ratio = float(chosen.pop(RATIO, settings.recompute_ratio))
        if chosen.get("lookup") in PREFIX_LOOKUPS:
            exact: dict[str, float | str] = {"mask": "exact", "gap": "recompute"}
            chosen = {axis: value for axis, value in exact.items() if axis not in fixed} | chosen
        yield ratio, replace(settings.switches, **chosen)  # type: ignore[arg-type]


def _name(axes: Mapping[str, Values], ratio: float, switches: Switches) -> str:
    """What sets a cell apart in its study, fit for a folder's name."""
    parts = [f"{100 * ratio:g}-percent" if axis == RATIO else str(getattr(switches, axis)) for axis in axes]
    return ".".join(parts) or "cell"
