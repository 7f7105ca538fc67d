"""`kvaudit policies`: the recomputation policies that can be audited, and what it takes to add one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(invoke_without_command=True)

_EXAMPLES = """\b
Examples:
  kvaudit policies
  kvaudit policies | grep document
  kvaudit policies new my-policy
  kvaudit policies check ./my_policy.py:MyPolicy

\b
How a policy follows what was published: exact, by published code or a formula; port, by somebody else's port;
described, by a description, for want of code. A control has no paper: it makes the others meaningful.
"""

_NEW_EXAMPLES = """\b
Examples:
  kvaudit policies new my-policy
  kvaudit policies new widest-gap -o research/policies
"""

_CHECK_EXAMPLES = """\b
Examples:
  kvaudit policies check ./my_policy.py:MyPolicy
  kvaudit policies check ./my_policy.py:MyPolicy:spread=0.25 my_package.policies:Other
  kvaudit policies check legolink:k=8

\b
Exit codes: 0 every check passed, 1 one failed, 2 a policy that cannot be loaded.
"""


@app.callback(epilog=_EXAMPLES)
def policies(context: typer.Context) -> None:
    """List the recomputation policies: what each does, by which source, with which parameters, and what it needs.

    `new` writes one of your own, `check` holds one to the contract.
    """
    if context.invoked_subcommand is None:
        from kvaudit.cli.listing import print_policies

        print_policies()


@app.command(epilog=_NEW_EXAMPLES)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The policy's name, such as my-policy.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where to write; made where there is none.")
    ] = Path(),
) -> None:
    """Write a policy that runs as it is, and its test, to start from. Nothing is overwritten."""
    from kvaudit.policy_specs.starting import write_new

    written = write_new(name, output)
    spec = shlex.quote(written.spec)
    typer.echo(f"Wrote {written.policy} and {written.test}. Next:")
    typer.echo(f"  kvaudit policies check {spec}")
    typer.echo(f"  pytest {shlex.quote(str(written.test))}")
    typer.echo(f"  kvaudit replay trace.jsonl --policy {spec}")


@app.command(epilog=_CHECK_EXAMPLES, short_help="Hold policies to the contract, a line a check.")
def check(
    specs: Annotated[
        list[str],
        typer.Argument(metavar="POLICY...", help="As `kvaudit replay --policy` takes it."),
    ],
) -> None:
    """Hold policies to the contract on synthetic requests, a line for each check.

    Exactly k distinct reusable positions, also at extreme shapes; the same again under the same seed; no state between
    requests; signals as declared; budgets and schedules as they must be. What is slow gets a warning.
    """
    from kvaudit.policies.checking import checks
    from kvaudit.policy_specs import read_policies
    from kvaudit.reports.escape import visible

    passed = True
    for spec in read_policies(specs):
        typer.echo(visible(f"{spec.name} ({spec.target})"))
        for result in checks(spec.make):
            status = "FAILED" if not result.passed else "warning" if result.warning else "ok"
            warning = f"; {result.warning}" if result.warning else ""
            typer.echo(visible(f"  {status:<7}  {result.name}: {result.detail}{warning}"))
            passed &= result.passed
    raise typer.Exit(0 if passed else 1)
