"""`kvaudit doctor`: what is installed, which engine works here, and what an engine really does."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.cli.servers import SERVER, server_options
from kvaudit.cli.values import name_and_value, preset_with
from kvaudit.engines import PRESETS, EngineSettings
from kvaudit.errors import UsageError

if TYPE_CHECKING:
    from kvaudit.doctor.readiness import Survey
    from kvaudit.doctor.trying import Trial

DOCTOR_VERSION = 1
"""Counts changes of the layout of --format json."""

EXAMPLES = """\b
Examples:
  kvaudit doctor
  kvaudit doctor --engine lmcache
  kvaudit doctor --engine lmcache --model Qwen/Qwen3-8B --dtype bfloat16 -f json
  kvaudit doctor --engine embedded --like epic
  kvaudit doctor --engine server --model NAME --option base-url=http://localhost:8000/v1 --option reset=vllm

\b
Exit codes, without --engine: 0 the default engine works, 3 it does not. With --engine: 0 the engine starts and every
check saw what it does, whatever that is; 2 it is not installed in a version that fits, or its settings would spoil an
audit; 3 it does not start or a check failed; 4 a check could not see.
"""

_DEFAULTS = EngineSettings()
_AS_OPTION = "--option NAME=VALUE, such as --option base-url=http://HOST:PORT/v1"
_FORMATS = ("terminal", "json")
_WIDEST = 120
_NARROWEST = 60


def doctor(
    context: typer.Context,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Start this engine as well and check what it does; see `kvaudit engines`."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="smollm2-135m, a model folder or a Hugging Face id.")
    ] = _DEFAULTS.model,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu or cuda.")] = _DEFAULTS.device,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="float32, bfloat16 or float16.")] = _DEFAULTS.dtype,
    like: Annotated[
        str, typer.Option(metavar="PRESET", help=f"The embedded engine's switches: {', '.join(PRESETS)}.")
    ] = "lmcache",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An option of the engine's own, a server's as well; may be given again."
        ),
    ] = None,
    page_format: Annotated[str, typer.Option("--format", "-f", metavar="NAME", help="terminal or json.")] = "terminal",
) -> None:
    """Say what is installed, which engines work on this machine, and what to install for those that do not.

    With --engine, its settings are checked, it is started twice, and it is watched at work: whether recomputed rows see
    later tokens, what stands between chunks, whether new chunks are lost, whether a miss hides later hits, which writer
    wins, whether keys move with their chunk, and how much of all that is noise. An engine that does not show its cache
    (vllm, server) is asked for the same answer by full prefill, new, again, and after a reset that must empty it.
    """
    if page_format not in _FORMATS:
        raise UsageError(f"unknown format {page_format!r}", f"known: {', '.join(_FORMATS)}")
    from kvaudit.doctor.readiness import survey

    if engine is not None:
        from kvaudit.plugins import find

        find("engines", engine)
        server_options(context, engine)
    settings = EngineSettings(
        model=model,
        device=device,
        dtype=dtype,
        switches=preset_with(like),
        options=dict(name_and_value(text) for text in option or ()),
    )
    seen = survey()
    trial = None if engine is None else _tried(engine, settings)
    if page_format == "json":
        typer.echo(_json(seen, trial), nl=False)
    else:
        _print(seen, trial)
    raise typer.Exit(_exit_code(seen, trial))


def _tried(engine: str, settings: EngineSettings) -> Trial:
    from kvaudit.doctor.trying import try_engine

    trial = try_engine(engine, settings, lambda what: typer.echo(f"{engine}: {what}", err=True))
    if engine == SERVER and trial.error_code == UsageError.exit_code:
        return replace(trial, hint=f"{trial.hint or 'mend it'} (here as {_AS_OPTION})")
    return trial


def _exit_code(seen: Survey, trial: Trial | None) -> int:
    if trial is not None:
        return trial.exit_code
    return 0 if seen.readiness("embedded").ready else 3


def _print(seen: Survey, trial: Trial | None) -> None:
    from kvaudit.doctor.page import survey_lines, trial_lines

    columns = (
        min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST) if _is_terminal() else _WIDEST
    )
    for line in (*survey_lines(seen, columns), *(trial_lines(trial, columns) if trial else ())):
        typer.echo(line)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _json(seen: Survey, trial: Trial | None) -> bytes:
    """The survey and what came of trying the engine, null where none was named."""
    import orjson

    data = {
        "doctor_version": DOCTOR_VERSION,
        "exit_code": _exit_code(seen, trial),
        "survey": seen,
        "trial": trial,
    }
    return orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
