"""A plug-in family, or the presets, as lines. Piped, each is one line; at a terminal its parts are wrapped under each
other.

One that cannot be loaded is listed as broken, by name.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict

import typer

from kvaudit.engines import PRESET_NOTES, PRESETS, Switches
from kvaudit.errors import PluginError
from kvaudit.plugins import BUILT_IN, Plugin, available, ignored, load
from kvaudit.reports.escape import visible

_WIDEST = 120


def print_engines() -> None:
    _print_family("engines", _about_engine)


def print_policies() -> None:
    _print_family("policies", _about_policy)


def print_presets() -> None:
    """Whose switches each preset of `kvaudit replay --like` sets, and to what."""
    _print_rows([(name, [PRESET_NOTES[name], _switches(preset)]) for name, preset in PRESETS.items()])


def _switches(preset: Switches) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(preset).items() if value is not None)


def _print_family(family: str, about: Callable[[Plugin], Sequence[str]]) -> None:
    rows: list[tuple[str, Sequence[str]]]
    rows = [(plugin.name, _unless_broken(about, plugin)) for plugin in available(family).values()]
    rows += [(plugin.name, [f"BROKEN: {plugin.target} is ignored: the name is taken"]) for plugin in ignored(family)]
    _print_rows(rows)


def _print_rows(rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    width = max(len(name) for name, _ in rows) + 2
    columns = min(shutil.get_terminal_size().columns, _WIDEST) if sys.stdout.isatty() else None
    for name, parts in rows:
        for line in _lines(visible(name), [visible(" ".join(part.split())) for part in parts], width, columns):
            typer.echo(line)


def _lines(name: str, parts: Sequence[str], width: int, columns: int | None) -> list[str]:
    """One line for a pipe (no columns), else each part from a line of its own on, indented by the width of names."""
    if columns is None:
        return [f"{name:<{width}}{'; '.join(parts)}"]
    wrapped = [line for part in parts for line in textwrap.wrap(part, max(20, columns - width))]
    return [f"{start:<{width}}{line}" for start, line in zip([name, *[""] * len(wrapped)], wrapped, strict=False)]


def _unless_broken(about: Callable[[Plugin], Sequence[str]], plugin: Plugin) -> Sequence[str]:
    try:
        return about(plugin)
    except PluginError as error:
        return [f"BROKEN: {error.message}"]


def _about_engine(plugin: Plugin) -> list[str]:
    load("engines", plugin.name)
    return [plugin.summary, *_needs(plugin.needs)]


def _about_policy(plugin: Plugin) -> list[str]:
    """What it does, how closely it follows what was published and where that stands, its parameters, its needs."""
    from kvaudit.policy_specs import parameters_of, policy_class

    policy = policy_class(plugin.name)
    parameters = [f"{parameter} [{parameter.kind}]" for parameter in parameters_of(policy)]
    told = [f"parameters: {', '.join(parameters)}"] if parameters else []
    if plugin.name not in BUILT_IN["policies"]:
        return [_first_line(policy), f"from {plugin.target}", *told, *_needs(", ".join(sorted(policy.needs)))]
    standing = ": ".join(part for part in (plugin.standing, plugin.source) if part)
    return [plugin.summary, *([standing] if standing else []), *told, *_needs(plugin.needs)]


def _needs(needs: str) -> list[str]:
    return [f"needs {needs}"] if needs and needs != "nothing" else []


def _first_line(policy: type) -> str:
    """Of its docstring; a dataclass without one has its signature there, which is none."""
    text = inspect.cleandoc(policy.__dict__.get("__doc__") or "")
    if not text or text.startswith(f"{policy.__name__}("):
        return "a policy without a docstring"
    return text.splitlines()[0].removesuffix(".")
