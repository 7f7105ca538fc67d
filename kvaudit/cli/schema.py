"""`kvaudit schema`: what the tables of a run hold."""

from __future__ import annotations

import typer

EXAMPLES = """\b
Examples:
  kvaudit schema
  kvaudit schema | less
"""


def schema() -> None:
    """Print the tables of a run, their columns and the figures of an audit, as Markdown."""
    from kvaudit.schema.reference import as_markdown

    typer.echo(as_markdown(), nl=False)
