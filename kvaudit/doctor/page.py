"""What `kvaudit doctor` saw, as lines for people. Commands stand on a line of their own, however long, to be copied."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvaudit.doctor.readiness import Readiness, Survey
from kvaudit.engines.vllm.machine import Gpu, Machine
from kvaudit.engines.vllm.versions import place
from kvaudit.reports.escape import visible

if TYPE_CHECKING:
    from kvaudit.doctor.trying import Trial

_INDENT = "  "
_UNSET = {
    "PYTHONHASHSEED": "kvaudit sets 0 for engines that it starts in a process of their own; a server of yours needs "
    "one, or no two processes find each other's cache entries",
    "OMP_NUM_THREADS": "kvaudit gives vLLM on the CPU half of the cores; the embedded engine takes what torch takes",
    "VLLM_CPU_OMP_THREADS_BIND": "kvaudit sets nobind, so that threads do not fight for cores that others use",
}
"""What follows from a variable that is not set, where something does."""


def survey_lines(survey: Survey, columns: int) -> Iterator[str]:
    yield visible(f"kvaudit {survey.kvaudit}, Python {survey.python}, {survey.platform}")
    yield from _heading("Machine")
    yield from _paragraphs(_machine(survey.machine), columns)
    yield from _heading("Installed")
    there = [f"{package} {version}" for package, version in survey.packages.items() if version]
    missing = [package for package, version in survey.packages.items() if not version]
    yield from _paragraphs([", ".join(there) or "nothing of what engines need"], columns)
    yield from _paragraphs([f"not installed: {', '.join(missing)}"] if missing else [], columns)
    yield from _paragraphs([f"kvaudit knows {row}" for row in survey.supported], columns)
    yield from _heading("Engines")
    width = max(len(one.engine) for one in survey.engines) + 2
    for one in survey.engines:
        yield from _engine(one, width, columns)
    yield from _heading("Environment")
    yield from _environment(survey, columns)


def trial_lines(trial: Trial, columns: int) -> Iterator[str]:
    yield from _heading(f"Engine {trial.engine}, model {trial.model}")
    width = max([len(one.name) for one in trial.settings] + [len(one.check) for one in trial.findings] + [8]) + 2
    for setting in trial.settings:
        kind = "spoils an audit" if setting.spoils else "to be known"
        yield from _row(setting.name, [f"{kind}: {setting.wrong}", setting.fix], width, columns)
    if not trial.settings and not trial.error:
        yield from _row("settings", ["nothing that would spoil an audit"], width, columns)
    for finding in trial.findings:
        what = finding.value or f"{finding.outcome}: {finding.reason}"
        like = f" ({finding.switch})" if finding.switch else ""
        measured = ", ".join(f"{name} {number:.3g}" for name, number in finding.evidence.items())
        yield from _row(finding.check, [part for part in (f"{what}{like}", measured) if part], width, columns)
    if trial.error:
        yield from _row("FAILED", trial.error.splitlines(), width, columns)
        yield from _command_or_text(trial.hint, width, columns)


def _engine(one: Readiness, width: int, columns: int) -> Iterator[str]:
    where = f", on {place(one.device)}" if one.device else ""
    said = f"works{where}" if one.ready else f"does not work: {'; '.join(one.reasons)}"
    yield from _row(one.engine, [said, *one.notes], width, columns)
    if one.install:
        yield f"{_INDENT}{'':<{width}}{visible(one.install)}"


def _machine(machine: Machine) -> list[str]:
    gpus = [_gpu(gpu) for gpu in machine.gpus] or [machine.gpu_trouble or "no NVIDIA GPU"]
    return [f"{machine.processor}, {machine.cores} cores to use, {_gib(machine.memory_bytes)} of memory", *gpus]


def _gpu(gpu: Gpu) -> str:
    memory = "the machine's memory" if gpu.memory_bytes is None else f"{_gib(gpu.memory_bytes)} of memory"
    return f"{gpu.name}, {memory}, driver {gpu.driver}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _environment(survey: Survey, columns: int) -> Iterator[str]:
    width = max(map(len, survey.variables)) + 2
    for name, value in survey.variables.items():
        unset = f"not set: {_UNSET[name]}" if name in _UNSET else "not set"
        yield from _row(name, [unset if value is None else value or "set, and empty"], width, columns)
    if survey.other_variables:
        yield from _row("also set", [", ".join(survey.other_variables)], width, columns)


def _command_or_text(hint: str | None, width: int, columns: int) -> Iterator[str]:
    if hint and " && " in hint:
        yield f"{_INDENT}{'':<{width}}{visible(hint)}"
    elif hint:
        yield from _row("", hint.splitlines(), width, columns)


def _heading(title: str) -> Iterator[str]:
    yield ""
    yield title


def _paragraphs(lines: Sequence[str], columns: int) -> Iterator[str]:
    for line in lines:
        yield from textwrap.wrap(visible(line), columns, initial_indent=_INDENT, subsequent_indent=2 * _INDENT)


def _row(name: str, parts: Sequence[str], width: int, columns: int) -> Iterator[str]:
    """A name, and beside it each part from a line of its own on."""
    start = f"{_INDENT}{visible(name):<{width}}"
    for part in parts or ("",):
        yield from textwrap.wrap(
            visible(part), columns, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
        ) or [start.rstrip()]
        start = " " * len(start)
