"""`kvaudit engines`: the engines that can be audited."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  kvaudit engines
  kvaudit engines --presets
  kvaudit replay trace.jsonl --engine embedded
"""


def engines(
    presets: Annotated[
        bool, typer.Option("--presets", help="List the presets of `kvaudit replay --like` and what each sets.")
    ] = False,
) -> None:
    """List the engines, one a line, with what each needs."""
    from kvaudit.cli.listing import print_engines, print_presets

    if presets:
        print_presets()
    else:
        print_engines()
