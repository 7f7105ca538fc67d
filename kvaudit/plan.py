"""What a replay will do: the engine and its settings, the policies, the orders, and the arms that follow (DESIGN 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvaudit.engines import EngineSettings
from kvaudit.errors import UsageError
from kvaudit.orders import make_orders
from kvaudit.plugins import available, load
from kvaudit.records import FULL_PREFILL, Arm, Order

DEFAULT_POLICIES = ("token-topk", "document-aligned")


@dataclass(frozen=True, slots=True)
class Plan:
    engine: str
    settings: EngineSettings
    policies: tuple[str, ...]
    orders: tuple[Order, ...]

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Full prefill twice; then, policy by policy, every order and the two controls."""
        chronological = self.orders[0]
        arms = [Arm(FULL_PREFILL, chronological, "none"), Arm(FULL_PREFILL, chronological, "repeat")]
        for policy in self.policies:
            arms += [Arm(policy, order, "none") for order in self.orders]
            arms += [Arm(policy, chronological, "reset"), Arm(policy, chronological, "repeat")]
        return tuple(arms)

    def as_data(self) -> dict[str, Any]:
        """Everything that answers depend on beside the trace, JSON-ready."""
        return {
            "engine": self.engine,
            **asdict(self.settings),
            "policies": list(self.policies),
            "orders": len(self.orders),
        }


def make_plan(requests: int, engine: str, settings: EngineSettings, policies: Sequence[str], orders: int) -> Plan:
    """Raises UsageError for unknown names and for settings that cannot work, before any model is loaded."""
    if engine not in available("engines"):
        load("engines", engine)
    policies = tuple(dict.fromkeys(policies or DEFAULT_POLICIES))
    for policy in policies:
        if policy == FULL_PREFILL:
            raise UsageError(f"{FULL_PREFILL!r} is what every policy is compared with", "it always runs: leave it out")
        load("policies", policy)
    ratio = settings.recompute_ratio
    if not (math.isfinite(ratio) and 0 < ratio <= 1):
        raise UsageError(
            f"the recompute ratio is {ratio}",
            "give a share above 0 and at most 1, such as 0.15; to recompute nothing, take --policy none",
        )
    if settings.switches.check_layer < 0:
        raise UsageError(f"the check layer is {settings.switches.check_layer}", "give a layer of 0 or above")
    capacity = settings.switches.capacity_bytes
    if capacity is not None and capacity <= 0:
        raise UsageError(f"the cache capacity is {capacity} bytes", "give a size such as 512MiB")
    return Plan(engine, settings, policies, make_orders(requests, orders, settings.seed))
