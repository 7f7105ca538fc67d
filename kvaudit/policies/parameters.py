"""Checks of policies' parameters."""

from __future__ import annotations

from kvaudit.errors import UsageError
from kvaudit.policies import Policy


def at_least(policy: Policy, parameter: str, least: float) -> None:
    """Raises UsageError, naming the policy, where its parameter is below `least` or is no number."""
    value = getattr(policy, parameter)
    if not value >= least:
        raise UsageError(f"policy {policy.name!r}: {parameter} is {value}", f"it is {least} or more")
