"""What changed since another run: settings, figures, and which requests flip now.

Two runs are paired request by request: over the requests that have the same prompt in both, and the arms that served
them in the same order under the same control.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvaudit.analysis import stats
from kvaudit.analysis.compare import NOT_COMPARABLE, Grid, Integers, Pair, PlannedArm, list_codes
from kvaudit.analysis.figures import Contrast, Figure, contrasted, estimated, stream_overlap, variation_by_request
from kvaudit.analysis.findings import Finding
from kvaudit.analysis.stats import Floats
from kvaudit.records import REPRODUCTIONS

UNKNOWN_PROMPT = -1
_COMPARED = ("kvaudit_version", "trace", "settings", "engine", "libraries", "host")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, library or engine fact that is not the same in both runs, by its place in the manifest
    (`settings.switches.mask`); None where a run does not have it."""

    name: str
    before: Any
    now: Any


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both runs. `figure` is the paired difference, now minus before, over the requests of both: its metric
    is `fidelity_change` or `variation_change`, its `discordant` counts requests that are right only now and only
    before. `gained` and `lost` are the sums over requests of what rose and what fell."""

    figure: Figure
    before: float
    now: float
    gained: float
    lost: float


@dataclass(frozen=True, slots=True)
class Flips:
    """Requests of both runs that, under one policy, change with the order now and did not before, and the reverse."""

    policy: str
    newly: tuple[str, ...]
    no_longer: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Baseline:
    """This run held against an earlier one, of which `manifest` and `findings` are.

    requests: how many have the same prompt in both; overlap: how many successive ones share content.
    only_now, only_before: how many have no counterpart.
    unpaired: (policy, order) that only this run replayed: nothing is known of a change there.
    """

    manifest: Mapping[str, Any]
    findings: tuple[Finding, ...]
    settings: tuple[Setting, ...]
    requests: int
    overlap: int
    only_now: int
    only_before: int
    policies_only_now: tuple[str, ...]
    policies_only_before: tuple[str, ...]
    unpaired: tuple[tuple[str, str], ...]
    changes: tuple[Change, ...]
    flips: tuple[Flips, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs. `requests` is its table of that name, `findings` what was seen in it."""

    manifest: Mapping[str, Any]
    findings: tuple[Finding, ...]
    grid: Grid
    pairs: tuple[Pair, ...]
    requests: pa.Table

    def agreement(self, policy: str, order: str, control: str) -> NDArray[np.int8] | None:
        """Which answers of an arm equal full prefill's: int8 [R]; None without such an arm."""
        arms = self.grid.find(policy, control, order)
        found = [pair.agreement for pair in self.pairs if pair.kind == "reference" and pair.right in arms]
        return found[0] if found else None


class Shared(NamedTuple):
    """What both runs have: positions of their common requests in each, and the arms as (policy, order, control)."""

    now: Integers
    before: Integers
    arms: tuple[tuple[str, str, str], ...]


def against(now: Side, before: Side, seed: int) -> Baseline:
    """What changed from `before` to `now`. `seed` seeds the bootstrap."""
    same = _same_prompts(now, before)
    shared = Shared(*same, _shared_arms(now.grid, before.grid))
    overlap = stream_overlap(now.requests)
    block = stats.block_length(overlap, len(shared.now))
    policies_now, policies_before = now.grid.policies, before.grid.policies
    return Baseline(
        manifest=before.manifest,
        findings=before.findings,
        settings=tuple(_settings(before.manifest, now.manifest)),
        requests=len(shared.now),
        overlap=overlap,
        only_now=len(now.requests) - len(shared.now),
        only_before=len(before.requests) - len(shared.now),
        policies_only_now=tuple(name for name in policies_now if name not in policies_before),
        policies_only_before=tuple(name for name in policies_before if name not in policies_now),
        unpaired=tuple(
            (arm.policy, arm.order)
            for arm in now.grid.arms
            if arm.control == "none" and arm.policy in policies_now and _identity(arm)[:3] not in shared.arms
        ),
        changes=(
            *_fidelity_changes(now, before, shared, block),
            *_variation_changes(now, before, shared, block, seed),
        ),
        flips=tuple(_flips(now, before, shared)),
    )


def _same_prompts(now: Side, before: Side) -> tuple[Integers, Integers]:
    """Positions of the requests that both runs have under the same id with the same segments."""
    position = pc.fill_null(pc.index_in(now.grid.request_ids, value_set=before.grid.request_ids), -1).to_numpy()
    mine = np.flatnonzero(position >= 0)
    theirs = position[mine].astype(np.int64)
    if _trace_digest(now) is None or _trace_digest(now) != _trace_digest(before):
        prompts = _prompts(pa.concat_tables([now.requests.sort_by("ordinal"), before.requests.sort_by("ordinal")]))
        left, right = prompts[mine], prompts[len(now.requests) + theirs]
        same = (left == right) & (left != UNKNOWN_PROMPT)
        mine, theirs = mine[same], theirs[same]
    return mine, theirs


def _trace_digest(side: Side) -> str | None:
    trace = side.manifest.get("trace")
    return trace.get("digest") if isinstance(trace, Mapping) else None


def _prompts(requests: pa.Table) -> Integers:
    """A code for each prompt, equal where all segments are; UNKNOWN_PROMPT where there are none to tell by."""
    segments = requests["segments"].combine_chunks()
    contents = segments.flatten().field("content_id").dictionary_encode().indices
    codes = list_codes(pa.chunked_array([pa.ListArray.from_arrays(segments.offsets, contents)]))
    return np.where(pc.list_value_length(segments).to_numpy() > 0, codes, UNKNOWN_PROMPT)


def _shared_arms(now: Grid, before: Grid) -> tuple[tuple[str, str, str], ...]:
    theirs = {_identity(arm) for arm in before.arms if arm.policy in before.policies}
    mine = [_identity(arm) for arm in now.arms if arm.policy in now.policies]
    return tuple(arm[:3] for arm in mine if arm in theirs and arm[2] not in REPRODUCTIONS)


def _identity(arm: PlannedArm) -> tuple[str, str, str, int | None]:
    return arm.policy, arm.order, arm.control, arm.order_seed


def _fidelity_changes(now: Side, before: Side, shared: Shared, block: int) -> Iterator[Change]:
    contrasts = []
    for policy, order, control in shared.arms:
        first, second = now.agreement(policy, order, control), before.agreement(policy, order, control)
        if first is not None and second is not None:
            figure = Figure("fidelity_change", policy, order, control)
            contrasts.append(Contrast(figure, first[shared.now], second[shared.before]))
    for contrast, figure in zip(contrasts, contrasted(contrasts, block), strict=True):
        compared = (contrast.first != NOT_COMPARABLE) & (contrast.second != NOT_COMPARABLE)
        if compared.any():
            first, second = contrast.first[compared], contrast.second[compared]
            gained, lost = float((first > second).sum()), float((first < second).sum())
            yield Change(figure, float(second.mean()), float(first.mean()), gained, lost)


def _variation_changes(now: Side, before: Side, shared: Shared, block: int, seed: int) -> Iterator[Change]:
    """Over the order pairs that both runs have."""
    for policy in dict.fromkeys(arm[0] for arm in shared.arms):
        mine, theirs = _variations(now, before, shared, policy)
        both = ~np.isnan(mine) & ~np.isnan(theirs)
        difference = np.where(both, mine - theirs, np.nan)[None]
        (estimate,) = stats.mean_intervals(difference, block, (-1.0, 1.0), seed)
        if estimate is not None:
            figure = estimated(Figure("variation_change", policy, control="none"), estimate)
            rose = difference[0, both]
            gained, lost = float(rose.clip(min=0).sum()), float(-rose.clip(max=0).sum())
            yield Change(figure, float(theirs[both].mean()), float(mine[both].mean()), gained, lost)


def _variations(now: Side, before: Side, shared: Shared, policy: str) -> tuple[Floats, Floats]:
    orders = {order for name, order, control in shared.arms if name == policy and control == "none"}

    def variation(side: Side) -> Floats:
        arms = side.grid.arms
        pairs = [
            pair
            for pair in side.pairs
            if pair.kind == "orders" and {arms[pair.left].order, arms[pair.right].order} <= orders
        ]
        return variation_by_request(side.grid, pairs, policy)

    return variation(now)[shared.now], variation(before)[shared.before]


def _flips(now: Side, before: Side, shared: Shared) -> Iterator[Flips]:
    ids = now.grid.request_ids.take(pa.array(shared.now))
    for policy in dict.fromkeys(arm[0] for arm in shared.arms):
        mine, theirs = _variations(now, before, shared, policy)
        newly = ids.filter(pa.array((mine > 0) & (theirs == 0)))
        no_longer = ids.filter(pa.array((mine == 0) & (theirs > 0)))
        yield Flips(policy, tuple(newly.to_pylist()), tuple(no_longer.to_pylist()))


def _settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Setting]:
    old, new = dict(_flat(before)), dict(_flat(now))
    for name in dict.fromkeys((*old, *new)):
        change = old.get(name), new.get(name)
        # An engine repeats the settings that it was opened with.
        asked = name.replace("engine.", "settings.", 1)
        if change[0] != change[1] and (asked == name or change != (old.get(asked), new.get(asked))):
            yield Setting(name, *change)


def _flat(manifest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in manifest.items():
        if not prefix and name not in _COMPARED:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
