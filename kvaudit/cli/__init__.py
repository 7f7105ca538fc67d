"""The command line: one file a command.

Command modules import what is heavy inside their functions, so that `kvaudit --help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from kvaudit import __version__
from kvaudit.cli import compare, doctor, engines, inspect, policies, record, replay, report, schema
from kvaudit.errors import EngineError, KvauditError, UsageError
from kvaudit.reports.escape import visible

_WRONG_USAGE = 2
_FAILED = 3
_INTERRUPTED = 130
_PIPE_CLOSED = 141
_TRACEBACK = "KVAUDIT_TRACEBACK"

_ClickError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Of the click that typer uses: its own copy in newer versions."""

_IN_ORDER = ("record", "inspect", "replay", "report", "compare", "policies", "engines", "doctor", "schema")


class _Commands(TyperGroup):
    """Lists the commands in the order in which a user needs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_IN_ORDER.index)


app = typer.Typer(
    name="kvaudit",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="""\b
Examples:
  kvaudit record rolling prices.csv --window 8 -o trace.jsonl
  kvaudit replay trace.jsonl --orders 5 -o runs/prices
  kvaudit report runs/prices

\b
Exit codes:
  0    a pass, or a conclusive audit without gates
  1    a gate failed
  2    wrong usage, a bad trace or a bad run
  3    the engine or the replay failed
  4    inconclusive
  130  interrupted: finished arms are kept
""",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvaudit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Can the KV reuse of an LLM serving engine be trusted?

    Replays recorded requests in several orders over a persistent KV cache, compares every answer with full prefill,
    and says whether answers depend on what was served before.
    """


app.add_typer(record.app, name="record")
app.command("inspect", epilog=inspect.EXAMPLES, short_help="Say what a trace holds and what could be reused of it.")(
    inspect.inspect
)
app.command("replay", epilog=replay.EXAMPLES, short_help="Replay a trace in several orders and under controls.")(
    replay.replay
)
app.command("report", short_help="Print what a replay found.")(report.report)
app.command("compare", short_help="Show what changed from one run to another.")(compare.compare)
app.add_typer(policies.app, name="policies", short_help="List, write and check recomputation policies.")
app.command("engines", epilog=engines.EXAMPLES, short_help="List the engines.")(engines.engines)
app.command("doctor", epilog=doctor.EXAMPLES, short_help="Say which engines work here, and what one really does.")(
    doctor.doctor
)
app.command("schema", epilog=schema.EXAMPLES, short_help="Say what the tables of a run hold.")(schema.schema)


def main() -> NoReturn:
    """Run the command line; every error is one line on stderr, with a line on what to do, and an exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing half-written is left
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed", "send it to a file or to /dev/null")
        code = _run()
        sys.stdout.flush()
    except KvauditError as error:
        _say(error.message, error.hint)
        code = error.exit_code
    except BrokenPipeError:
        code = _PIPE_CLOSED
        _discard_output()
    except OSError as error:
        _say(f"{error.filename or 'cannot write the output'}: {error.strerror or error}")
        code = _FAILED
        _discard_output()
    except Exception as error:
        _say_unexpected(error)
        code = _FAILED
    sys.exit(code)


def _run() -> int:
    try:
        code = app(prog_name="kvaudit", standalone_mode=False)
    except _ClickError as error:
        _say_wrong_usage(error)
        return _WRONG_USAGE
    except typer.Abort:
        return _INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise EngineError(
            f"something left the program with exit code {stop.code}, before the command was done",
            "no command of kvaudit's own does; a plug-in that calls sys.exit must be mended",
        ) from stop
    return code if isinstance(code, int) else 0


def _say_wrong_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    context = getattr(error, "ctx", None)
    words = "kvaudit" if context is None else context.command_path
    _say(error.format_message(), f"see {words} --help")


def _say_unexpected(error: Exception) -> None:
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    _say(
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        f"this is a bug in kvaudit or in a plug-in; {_TRACEBACK}=1 in the environment shows where",
    )


def _say(message: str, hint: str | None = None) -> None:
    """Further lines of a hint are the end of somebody's log."""
    first, *log = hint.split("\n") if hint else [""]
    lines = [f"kvaudit: error: {_on_a_line(message)}", *([f"kvaudit: hint: {_on_a_line(first)}"] if first else [])]
    for line in (*lines, *(f"  {_on_a_line(line)}" for line in log if line.strip())):
        with suppress(OSError):  # an error that cannot be told keeps its exit code
            typer.echo(line, err=True)


def _on_a_line(text: str) -> str:
    return visible(" ".join(text.split()))


def _discard_output() -> None:
    """Nobody reads on, so what is left in the buffer must not be an error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
