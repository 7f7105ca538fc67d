"""The examples that formats carry: their documentation, and here their tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

from kvaudit.plugins import BUILT_IN
from kvaudit.records import Trace

MODULES = {name: import_module(plugin.target.partition(":")[0]) for name, plugin in BUILT_IN["traces"].items()}
EXAMPLES: list[tuple[str, str, Mapping[str, Sequence[str]]]] = [
    (name, text, becomes) for name, module in MODULES.items() for text, becomes in getattr(module, "EXAMPLES", ())
]
"""(format, file, messages of each request by its id)."""


def shown(trace: Trace) -> dict[str, list[str]]:
    return {
        request.request_id: [f"{segment.role or segment.kind}: {segment.text}" for segment in request.segments]
        for request in trace.requests
    }
