"""The options of `kvaudit replay` for one kind of engine: servers as they are, or engines that take policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from kvaudit.engines.server.options import OPTIONS
from kvaudit.errors import UsageError
from kvaudit.plugins import find
from kvaudit.records import FULL_PREFILL

if TYPE_CHECKING:
    from kvaudit.engines import EngineSettings
    from kvaudit.records import Arm, Trace

SERVER = "server"
_OF_COMPUTING = (
    "recompute_ratio",
    "device",
    "dtype",
    "like",
    "mask",
    "gap",
    "lookup",
    "write_back",
    "keys",
    "suffix",
    "deviation",
    "check_layer",
    "cache_capacity",
)
"""Parameters that say how an engine computes: one without policies heeds those that its plug-in names."""
_OF_SERVERS = ("compare_url", "compare_model", "max_retried")
"""Parameters for servers that are no options of the engine."""


def server_options(context: typer.Context, engine: str) -> dict[str, str]:
    """What was given of the server's options, under the engine's names.

    Raises UsageError for options that the engine has no use for, and for a server without a model.
    """
    given = set(_given(context))
    plugin = find("engines", engine)
    if not plugin.policies and "study" in given:
        raise UsageError(f"--study compares policies, and engine {engine!r} takes none", "leave it out")
    for name in () if plugin.policies else _OF_COMPUTING:
        if name in given and name not in plugin.settings:
            raise UsageError(
                f"{_flag(name)} says how an engine computes, and engine {engine!r} decides that itself", "leave it out"
            )
    options = {name: str(context.params[_parameter(name)]) for name in OPTIONS if _parameter(name) in given}
    if engine == SERVER and "model" not in given:
        raise UsageError("engine 'server' needs the name of a model", "give --model as the server lists it")
    others = {*options, *(name.replace("_", "-") for name in _OF_SERVERS if name in given)}
    if others and engine != SERVER:
        raise UsageError(f"--{min(others)} is for a server, and the engine is {engine!r}", "add --engine server")
    return options


def compared_deployments(context: typer.Context, trace: Trace, settings: EngineSettings) -> int:
    """The exit code of `--compare-url`. Raises UsageError for options that it has no use for."""
    from kvaudit.cli.deployments import NO_USE, compare_deployments, default_file

    given = set(_given(context))
    for name in NO_USE:
        if name in given:
            raise UsageError(f"--compare-url audits no cache, and {_flag(name)} has no use", "leave it out")
    values = context.params
    output = values["output"] or default_file(values["trace"], settings, values["compare_url"])
    return compare_deployments(
        trace, settings, values["compare_url"], values["compare_model"], output, force=values["force"]
    )


def resets_note(arms: Sequence[Arm], requests: int, options: Mapping[str, str]) -> str:
    """What emptying the cache costs in questions: one before each reset and one behind it."""
    resets = sum(requests if arm.control == "reset" else 1 for arm in arms)
    emptied = sum(requests for arm in arms if arm.policy == FULL_PREFILL)
    by = "url" if options.get("reference-url") else options.get("reference", "auto")
    told = f"{2 * (resets + emptied if by == 'reset' else resets):,}"
    if by == "auto" and emptied:
        told += f" (or {2 * (resets + emptied):,}, where full prefill comes from resets too)"
    return f"at the resets kvaudit asks short questions of its own: {told}"


def _given(context: typer.Context) -> Iterator[str]:
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            yield name


def _parameter(option: str) -> str:
    return option.replace("-", "_")


def _flag(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"
