"""`kvaudit engines`: the engines that can be audited."""

from __future__ import annotations

EXAMPLES = """\b
Examples:
  kvaudit engines
  kvaudit replay trace.jsonl --engine embedded
"""


def engines() -> None:
    """List the engines, one a line, with what each needs."""
    from kvaudit.cli.listing import print_family

    print_family("engines")
