"""What a replay will do: the engine and its settings, the policies, the orders, and the arms that follow (DESIGN 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvaudit.digests import digested
from kvaudit.engines import EngineSettings, check_switches
from kvaudit.errors import UsageError
from kvaudit.orders import make_orders
from kvaudit.plugins import find
from kvaudit.policies.as_served import AsServed
from kvaudit.policy_specs import PolicySpec, read_policies
from kvaudit.records import AS_SERVED, FULL_PREFILL, Arm, Order

DEFAULT_POLICIES = ("token-topk", "document-aligned")
_BLACK_BOX_SETTINGS = ("model", "seed", "options")
"""All others say how an engine computes, which a black box decides by itself."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`specs` are the policies, each with everything that is needed to make it; of an engine that takes none
    (`black_box`), what stands in their place.
    """

    engine: str
    settings: EngineSettings
    specs: tuple[PolicySpec, ...]
    orders: tuple[Order, ...]
    black_box: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    @property
    def policy_sources(self) -> dict[str, str | None]:
        """By name, the digests of the files that the policies were written in."""
        return {spec.name: spec.source for spec in self.specs}

    def spec(self, policy: str) -> PolicySpec:
        return next(spec for spec in self.specs if spec.name == policy)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Full prefill twice; then, policy by policy, every order and the controls."""
        chronological = self.orders[0]
        reference = (Arm(FULL_PREFILL, chronological, "none"), Arm(FULL_PREFILL, chronological, "repeat"))
        arms = black_box_arms if self.black_box else policy_arms
        return reference + tuple(arm for spec in self.specs for arm in arms(spec, self.orders))

    def as_data(self) -> dict[str, Any]:
        """Everything that answers depend on beside the trace, JSON-ready, and without what may hold keys."""
        settings = asdict(self.settings)
        secret = find("engines", self.engine).digested
        settings["options"] = {
            name: digested(value) if name in secret else value for name, value in settings["options"].items()
        }
        return {
            "engine": self.engine,
            **{name: settings[name] for name in (self._heeded() if self.black_box else settings)},
            "policies": list(self.policies),
            "policy_sources": self.policy_sources,
            "orders": len(self.orders),
        }

    def _heeded(self) -> tuple[str, ...]:
        return _BLACK_BOX_SETTINGS + find("engines", self.engine).settings


def policy_arms(spec: PolicySpec, orders: Sequence[Order]) -> tuple[Arm, ...]:
    """A policy's arms: every order; the reset and the repeat control; for a policy that ranks by signals the rounding
    control, of the chronological order and of the one after it, which is the reversed one."""
    arms = [Arm(spec.name, order, "none") for order in orders]
    arms += [Arm(spec.name, orders[0], "reset"), Arm(spec.name, orders[0], "repeat")]
    if spec.make().needs:
        arms += [Arm(spec.name, order, "rounding") for order in orders[:2]]
    return tuple(arms)


def black_box_arms(spec: PolicySpec, orders: Sequence[Order]) -> tuple[Arm, ...]:
    """The arms of an engine that decides by itself: every order, the reset control, and every order again.

    What else happens at a server (another tenant, a restart, a busy device) may last as long as an arm: an order and
    its repeat are so far apart that it does not fall on both.
    """
    return (
        *(Arm(spec.name, order, "none") for order in orders),
        Arm(spec.name, orders[0], "reset"),
        *(Arm(spec.name, order, "repeat") for order in orders),
    )


def make_plan(requests: int, engine: str, settings: EngineSettings, policies: Sequence[str], orders: int) -> Plan:
    """`policies` as the command line takes them.

    Raises UsageError for unknown names and for settings that cannot work, and PluginError for what cannot be loaded,
    before any model is.
    """
    black_box = not find("engines", engine).policies
    if FULL_PREFILL in policies:
        raise UsageError(f"{FULL_PREFILL!r} is what every policy is compared with", "it always runs: leave it out")
    if tuple(policies) == (AS_SERVED,) or (black_box and not policies):
        return Plan(engine, settings, (_as_served(),), make_orders(requests, orders, settings.seed), black_box=True)
    if black_box:
        raise UsageError(
            f"engine {engine!r} takes no recomputation policy ({', '.join(policies)}): it is audited as it is",
            "leave --policy out",
        )
    specs = read_policies(policies or DEFAULT_POLICIES)
    for spec in specs:
        _check_engine_of(spec, engine)
    ratio = settings.recompute_ratio
    if not (math.isfinite(ratio) and 0 < ratio <= 1):
        raise UsageError(
            f"the recompute ratio is {ratio}",
            "give a share above 0 and at most 1, such as 0.15; to recompute nothing, take --policy none",
        )
    if settings.switches.check_layer < 0:
        raise UsageError(f"the check layer is {settings.switches.check_layer}", "give a layer of 0 or above")
    check_switches(settings.switches)
    capacity = settings.switches.capacity_bytes
    if capacity is not None and capacity <= 0:
        raise UsageError(f"the cache capacity is {capacity} bytes", "give a size such as 512MiB")
    return Plan(engine, settings, specs, make_orders(requests, orders, settings.seed))


def _check_engine_of(spec: PolicySpec, engine: str) -> None:
    own = spec.make().engine
    if own not in (None, engine):
        raise UsageError(
            f"policy {spec.name!r} is the selection of engine {own!r} itself, which engine {engine!r} does not have",
            f"leave it out, or take --engine {own}",
        )


def _as_served() -> PolicySpec:
    target = f"{AsServed.__module__}:{AsServed.__qualname__}"
    return PolicySpec(AS_SERVED, AS_SERVED, target, AsServed, (), {}, None)
