"""The options of `kvaudit replay` for one kind of engine: servers as they are, or engines that take policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from kvaudit.engines.server.options import OPTIONS, read_options
from kvaudit.errors import UsageError
from kvaudit.plugins import find
from kvaudit.records import FULL_PREFILL

if TYPE_CHECKING:
    from kvaudit.engines import EngineSettings
    from kvaudit.records import Arm, Trace

SERVER = "server"
_OF_ALL = frozenset({"trace", "model", "engine", "option", "seed", "output", "force", "format_name"})
_OF_ANY_ENGINE = _OF_ALL | {"orders", "policy", "max_noise", "study"}
"""Parameters that are heeded, or refused with reasons of their own, whatever the engine. All that are neither these nor
a server's say how an engine computes: one without policies heeds those that its plug-in names."""
_OF_SERVERS = ("compare_url", "compare_model", "max_retried")
"""Parameters for servers that are no options of the engine."""
_OF_COMPARISONS = _OF_ALL | {
    "compare_url",
    "compare_model",
    "base_url",
    "api",
    "timeout",
    "retries",
    "api_key_env",
    "other_key_env",
    "ca",
}
"""Parameters that a comparison of two deployments heeds; all others are an audit's."""


def server_options(context: typer.Context, engine: str) -> dict[str, str]:
    """What was given of the server's options, under the engine's names.

    Raises UsageError for options that the engine has no use for, and for a server without a model.
    """
    given = set(_given(context))
    plugin = find("engines", engine)
    if not plugin.policies and "study" in given:
        raise UsageError(f"--study compares policies, and engine {engine!r} takes none", "leave it out")
    of_servers = {*_OF_SERVERS, *map(_parameter, OPTIONS)}
    for name in () if plugin.policies else sorted(given - _OF_ANY_ENGINE - of_servers - {*plugin.settings}):
        raise UsageError(
            f"{_flag(name)} says how an engine computes, and engine {engine!r} decides that itself", "leave it out"
        )
    options = {name: str(context.params[_parameter(name)]) for name in OPTIONS if _parameter(name) in given}
    if engine == SERVER and "model" not in given:
        raise UsageError("engine 'server' needs the name of a model", "give --model as the server lists it")
    others = {*options, *(name.replace("_", "-") for name in _OF_SERVERS if name in given)}
    if others and engine != SERVER:
        raise UsageError(f"--{min(others)} is for a server, and the engine is {engine!r}", "add --engine server")
    if "compare_model" in given and "compare_url" not in given:
        raise UsageError("--compare-model is the model's name at --compare-url", "give that, or leave the name out")
    return options


def compared_deployments(context: typer.Context, trace: Trace, settings: EngineSettings) -> int:
    """The exit code of `--compare-url`. Raises UsageError for options that it has no use for."""
    from kvaudit.cli.deployments import compare_deployments, default_file

    for name in sorted({*_given(context), *map(_parameter, settings.options)} - _OF_COMPARISONS):
        raise UsageError(f"--compare-url audits no cache, and {_flag(name)} has no use", "leave it out")
    values = context.params
    output = values["output"] or default_file(values["trace"], settings, values["compare_url"])
    return compare_deployments(
        trace, settings, values["compare_url"], values["compare_model"], output, force=values["force"]
    )


def resets_note(arms: Sequence[Arm], requests: int, options: Mapping[str, str]) -> str:
    """What emptying the cache costs in questions: one before each reset and one behind it, and more of them where times
    alone tell. Raises UsageError for options that cannot be.
    """
    by = read_options(options).reference
    resets = sum(requests if arm.control == "reset" else 1 for arm in arms)
    emptied = sum(requests for arm in arms if arm.policy == FULL_PREFILL)
    told = f"{2 * (resets + emptied if by == 'reset' else resets):,}"
    if by == "auto" and emptied:
        told += f" (or {2 * (resets + emptied):,}, where full prefill comes from resets too)"
    return f"at the resets kvaudit asks short questions of its own, at least {told}"


def _given(context: typer.Context) -> Iterator[str]:
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            yield name


def _parameter(option: str) -> str:
    return option.replace("-", "_")


def _flag(parameter: str) -> str:
    return f"--{parameter.replace('_', '-')}"
