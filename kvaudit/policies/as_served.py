"""What stands in a policy's place where an engine takes none: it chooses by itself what it reuses."""

from __future__ import annotations

from kvaudit.errors import PolicyError
from kvaudit.policies import Policy, Positions, SelectionContext
from kvaudit.records import AS_SERVED


class AsServed(Policy):
    """The engine's cache in use, whatever it does with it."""

    name = AS_SERVED
    needs = frozenset()

    def select(self, context: SelectionContext) -> Positions:
        raise PolicyError(f"{AS_SERVED} selects nothing: the engine does", "take an engine without policies")
