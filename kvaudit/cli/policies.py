"""`kvaudit policies`: the recomputation policies that can be audited."""

from __future__ import annotations

EXAMPLES = """\b
Examples:
  kvaudit policies
  kvaudit policies | grep document
"""


def policies() -> None:
    """List the recomputation policies, one a line, with what each needs."""
    from kvaudit.cli.listing import print_family

    print_family("policies")
