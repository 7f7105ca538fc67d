"""What users write on the command line, as values, and what they are given to write."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvaudit.engines import PRESETS, Switches
from kvaudit.errors import UsageError

if TYPE_CHECKING:
    from kvaudit.records import Request, Trace
    from kvaudit.traces.streaming import StreamedTrace

LARGEST_NUMBER = 2**63
"""Numbers from here on have no place in a manifest."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_TRACE_SUFFIXES = {".gz", ".zst", ".jsonl", ".json", ".ndjson"}


def size_in_bytes(text: str) -> int:
    """`512MiB`, `2GB` or a plain number of bytes."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if matched is None or matched[2].lower() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", "write a number of bytes or, for instance, 512MiB or 2GB")
    size = float(matched[1]) * _UNITS[matched[2].lower()]
    if not size < LARGEST_NUMBER:
        raise UsageError(f"{text!r} is larger than any cache", "leave it out for no limit")
    return int(size)


def name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise UsageError(f"{text!r} is not an option of an engine", "write --option NAME=VALUE")
    return name, value


def preset_with(name: str, **switches: str | int | None) -> Switches:
    """A preset's switches; those that are given override it."""
    if name not in PRESETS:
        raise UsageError(f"unknown preset {name!r}", f"known: {', '.join(PRESETS)}")
    given = {switch: value for switch, value in switches.items() if value is not None}
    return replace(PRESETS[name], **given)  # type: ignore[arg-type]


def default_run_folder(trace: Path, digest: str, study: str | None = None) -> Path:
    """The same for the same trace and settings, so that the same command goes on where it stopped.

    `digest` is that of the settings, or of a study of the kind `study`.
    """
    name = Path(trace.name)
    while name.suffix in _TRACE_SUFFIXES:
        name = name.with_suffix("")
    readable = re.sub(r"[^\w.-]+", "-", str(name)).strip("-.") or "trace"
    kind = "" if study is None else f"{study}-"
    return Path("runs") / f"{readable}-{kind}{digest[:8]}"


def no_limit_note(requests: Iterable[Request], max_tokens: int, remedy: str) -> str | None:
    """What is said where requests set no max_tokens, so that no answer is cut in silence."""
    count = sum(not request.limited for request in requests)
    if not count:
        return None
    return f"{count:,} request{' sets' if count == 1 else 's set'} no max_tokens: {max_tokens} are replayed ({remedy})"


def left_out_notes(trace: Trace | StreamedTrace) -> list[str]:
    """What is said of a log that is read as it is: what was left out of it, and how the rest was taken."""
    from kvaudit.traces.foreign import LEFT_OUT, NOTES, told_counts
    from kvaudit.traces.native import HEADER
    from kvaudit.traces.tally import told_left_out

    header: Mapping[str, Any] = trace.header
    if HEADER in header:
        return []
    left_out = [f"left out {told_left_out(row)}" for row in header.get(LEFT_OUT, ())]
    return [*left_out, *header.get(NOTES, ()), *told_counts(header)]


def report_command(run: Path) -> str:
    """A command line that a shell reads as it stands."""
    path = str(run)
    return shlex.join(["kvaudit", "report", f"./{path}" if path.startswith("-") else path])
