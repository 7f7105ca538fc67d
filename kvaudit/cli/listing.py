"""A plug-in family as lines: name, summary, needs. One that cannot be loaded is listed as broken, by name."""

from __future__ import annotations

import typer

from kvaudit.errors import PluginError
from kvaudit.plugins import available, load


def print_family(family: str) -> None:
    known = available(family)
    width = max(map(len, known))
    for name, plugin in known.items():
        try:
            load(family, name)
        except PluginError as error:
            typer.echo(f"{name:<{width}}  BROKEN: {' '.join(error.message.split())}")
        else:
            needs = f"; needs {plugin.needs}" if plugin.needs and plugin.needs != "nothing" else ""
            typer.echo(f"{name:<{width}}  {plugin.summary}{needs}")
