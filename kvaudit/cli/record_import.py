"""`kvaudit record import`: turn logs and traces of other tools into kvaudit's own traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.cli import redacting, segmenting
from kvaudit.cli.recorded import counted, refuse_to_replace_input, say, say_written
from kvaudit.cli.values import no_limit_note
from kvaudit.plugins import BUILT_IN
from kvaudit.records import DEFAULT_MAX_TOKENS
from kvaudit.reports.escape import visible

if TYPE_CHECKING:
    from kvaudit.records import Request
    from kvaudit.traces.importing import Imported, ImportedFile

_FORMATS = "\n".join(f"  {plugin.name + ':':<17} {plugin.summary}" for plugin in BUILT_IN["traces"].values())

EXAMPLES = f"""\b
Examples:
  kvaudit record import requests.jsonl --max-tokens 64 -o trace.jsonl.gz
  kvaudit record import batch.jsonl batch-results.jsonl -o trace.jsonl.zst
  kvaudit record import trajectories/ --format swe-agent -o trace.jsonl.zst
  zcat litellm.jsonl.gz | kvaudit record import - -o trace.jsonl.zst
  kvaudit record import rag.jsonl --segment auto -o trace.jsonl.zst
  kvaudit record import rag.jsonl --segment 'pattern:<document>.*?</document>' -o trace.jsonl
  kvaudit record import capture.jsonl.zst --redact -o to-share.jsonl.zst

\b
Formats:
{_FORMATS}

\b
Plain, .gz and .zst are told by their content, and so is the format. Requests stay in
the order of the log; they are sorted by their times where a log is not in order.
Calls that failed, embeddings, images and audio are left out, and counted with their
lines. So are lines that cannot be read, where they are no more than the others, and
such files in a folder. So is what came before: the same id and prompt, and the same
time and session where both have one. Ids that count lines or exchanges are those of
another file only at the same fraction of a second. Other ids that came before are kept
under new names, and counted. A compressed file that is cut off is read up to there.
A trace of kvaudit's own is read whole or not at all.
Tool definitions become a system message and tool calls the end of their assistant's
message, both as JSON text: the model's own tool template is not used. Of a logged
answer only its length is taken, never its text.

{segmenting.NOTES}
{redacting.NOTES}"""

_AUTO = "auto"
_FILES_LISTED = 20
_NAMES_SHOWN = 3


def import_trace(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Logs, traces, folders of them, - for standard input.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="TRACE", help="The trace to write; .gz and .zst at its end compress it."
        ),
    ],
    format_name: Annotated[
        str, typer.Option("--format", metavar="NAME", help="The format of all files; auto tells each by its content.")
    ] = _AUTO,
    max_tokens: Annotated[
        int,
        typer.Option(min=1, help="The longest answer, in tokens, where neither the request nor the log says."),
    ] = DEFAULT_MAX_TOKENS,
    segment: segmenting.SegmentOption = None,
    model: segmenting.ModelOption = None,
    redact: redacting.Redact = False,
    redact_only: redacting.RedactOnly = None,
    redact_pattern: redacting.RedactPatterns = None,
) -> None:
    """Turn logs and traces of other tools, told by their content, into a trace of kvaudit's own."""
    from kvaudit.traces.importing import import_files
    from kvaudit.traces.writer import write_trace

    refuse_to_replace_input(files, output)
    redaction = redacting.asked(redact, redact_only, redact_pattern)
    cutting = segmenting.Segmenting(segment or (), model)
    segmenting.check_model_is_used(model, cuts=cutting.reads_tokens, counts=redaction is not None)
    format_or_none = None if format_name == _AUTO else format_name
    with redacting.hiding(redaction):
        imported = import_files(files, format_or_none, leave=output, keep_parts=cutting.keeps_parts)
    requests: Sequence[Request] = imported.requests
    header: Mapping[str, object] = imported.header()
    if redaction:
        with redacting.hiding(redaction):
            requests, header = redaction.apply(requests, header, model)
    requests, header = cutting.apply(requests, header)
    limited = (request if request.limited else replace(request, max_tokens=max_tokens) for request in requests)
    written = write_trace(output, limited, header)
    for line in (*_table(imported.files), *_notes(imported)):
        say(visible(redacting.shown(redaction, line)))
    if unlimited := no_limit_note(imported.requests, max_tokens, "--max-tokens sets another limit"):
        say(unlimited)
    if redaction:
        redaction.say()
    cutting.say()
    say_written(output, written)


def _table(files: Sequence[ImportedFile]) -> Iterator[str]:
    """What came in and what was left out, file by file or, of many, format by format; then the reasons."""
    rows = _by_format(files) if len(files) > _FILES_LISTED else [_row(file.name, [file]) for file in files]
    cells = [("read", "format", "records", "requests", "left out"), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    for row in cells:
        texts = [row[column].ljust(widths[column]) for column in (0, 1)]
        yield "  ".join([*texts, *(row[column].rjust(widths[column]) for column in (2, 3, 4))]).rstrip()
    several = len(files) > 1
    for count, reason, places in sorted(_reasons(files, several), key=lambda row: -row[0]):
        yield f"  left out {count:,}: {reason} ({places})"


def _by_format(files: Sequence[ImportedFile]) -> list[tuple[str, ...]]:
    names = sorted({file.format for file in files})
    groups = [[file for file in files if file.format == name] for name in names]
    return [_row(counted(len(group), "file"), group) for group in groups]


def _row(name: str, files: Sequence[ImportedFile]) -> tuple[str, ...]:
    left_out = sum(row["count"] for file in files for row in file.left_out)
    counts = (sum(file.records for file in files), sum(len(file.requests) for file in files), left_out)
    return (name, files[0].format or "-", *(f"{count:,}" for count in counts))


def _reasons(files: Sequence[ImportedFile], several: bool) -> Iterator[tuple[int, str, str]]:
    """(how many, why, the first places), over all files."""
    found: dict[str, list[tuple[ImportedFile, dict[str, Any]]]] = {}
    for file in files:
        for row in file.left_out:
            found.setdefault(row["reason"], []).append((file, row))
    for reason, rows in found.items():
        places = [f"{file.label} {place}" if several else place for file, row in rows for place in row["places"]][
            :_NAMES_SHOWN
        ]
        count = sum(row["count"] for _, row in rows)
        more = f" and {count - len(places):,} more" if count > len(places) else ""
        yield count, reason, ", ".join(places) + more
    refused: dict[str, list[str]] = {}
    for file in files:
        if file.refusal:
            refused.setdefault(file.refusal, []).append(file.label)
    for refusal, names in refused.items():
        yield len(names), f"file{'' if len(names) == 1 else 's'}: {refusal}", _few(names)


def _notes(imported: Imported) -> Iterator[str]:
    from kvaudit.traces.foreign import told_counts

    files_of: dict[str, list[str]] = {}
    for file in imported.files:
        for note in file.notes:
            files_of.setdefault(note, []).append(file.label)
    for note, names in files_of.items():
        yield f"{_few(names)}: {note}"
    yield from imported.notes
    yield from told_counts(sum((Counter(file.counts) for file in imported.files), Counter[str]()))


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
