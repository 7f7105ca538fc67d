"""What was audited, with every setting in force."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from kvaudit.analysis.audit import section
from kvaudit.reports.escape import excerpt, visible
from kvaudit.reports.terminal.layout import heading, sentences

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit


DIGEST_DIGITS = 12
"""Digits of a SHA-256 that are shown; the JSON report has them all."""
LONGEST_VALUE = 1_000


def parts(audit: Audit) -> Iterator[RenderableType]:
    manifest = audit.manifest
    chosen = section(manifest, "settings")
    plain = {name: value for name, value in chosen.items() if name not in ("switches", "options")}
    finished = sum(arm.finished for arm in audit.arms)
    libraries = section(manifest, "libraries")
    engine = _untold(section(manifest, "engine"), {**chosen, **libraries})
    lines = {
        "trace": f"{_listed(section(manifest, 'trace'))}",
        "arms": f"{finished} of {len(audit.arms)} finished",
        "settings": _listed(plain),
        "switches": _listed(_complete(section(chosen, "switches"))),
        "options": _listed(section(chosen, "options")),
        "engine": _listed(engine),
        "libraries": _listed(libraries),
    }
    yield from heading("What was audited")
    yield from sentences([f"{name}: {line}" for name, line in lines.items() if line])


def _untold(engine: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine says that no other line does, a digest under its first name only."""
    new = {name: value for name, value in engine.items() if name != "switches" and told.get(name) != value}
    digests = {value: name for name, value in reversed(new.items()) if _is_digest(value)}
    return {name: value for name, value in new.items() if not _is_digest(value) or digests[value] == name}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{visible(_words(name))} {_value(value)}" for name, value in values.items() if value is not None)


def _complete(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Every switch, set or not: what is not said could be taken for what is not there."""
    return {name: "unset" if value is None else value for name, value in switches.items()}


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _value(value: Any) -> str:
    if _is_digest(value):
        return f"{value[:DIGEST_DIGITS]}..."
    if isinstance(value, Mapping):
        return f"({_listed(value)})"
    if isinstance(value, list | tuple):
        return " ".join(_value(item) for item in value)
    return excerpt(str(value), length=LONGEST_VALUE)
