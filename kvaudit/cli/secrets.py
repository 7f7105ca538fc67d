"""`kvaudit inspect --secrets`: may this file be shared as it is?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import orjson
import typer

from kvaudit.cli.recorded import counted
from kvaudit.cli.redacting import NOT_LOOKED_FOR, chosen_detectors
from kvaudit.cli.unreadable import ReadableLines
from kvaudit.errors import UsageError
from kvaudit.redaction.scans import LineScan, Scan, TraceScan
from kvaudit.reports.escape import visible
from kvaudit.traces.native import HEADER
from kvaudit.traces.source import NotThisFormatError, TraceSource, open_source

if TYPE_CHECKING:
    from kvaudit.redaction.findings import Finding

REPORT_VERSION = 1
_PARAMETERS = ("trace", "secrets", "secret_pattern", "page_format", "strict")
_STANDARD_INPUT = "standard input"


class _Looked(NamedTuple):
    """`unit` is what `records` counts, and the records of each finding."""

    name: str
    unit: str
    records: int
    detectors: list[str]
    findings: list[Finding]
    not_utf8: int


def look_for_secrets(context: typer.Context, trace: Path, patterns: Sequence[str], page_format: str) -> bool:
    """Print what the detectors find in a file, and say whether they found anything or could not look at every line.

    Every line is looked at, also what no replay uses. Raises TraceError for a file that cannot be read or is no text
    in UTF-8, UsageError for a broken pattern and for options of `context` that inspect the trace otherwise.
    """
    _refuse_other_options(context)
    detectors = chosen_detectors(None, patterns)
    with open_source(trace) as source:
        own = _is_own(source)
        scan: Scan = TraceScan(detectors) if own else LineScan(detectors)
        lines = ReadableLines(source)
        for line, content in lines:
            _add(scan, line, content)
        names = [detector.name for detector in detectors]
        unit = "request" if own else "line"
        looked = _Looked(source.name, unit, scan.records, names, scan.findings(), lines.not_utf8)
    for text in _json(looked) if page_format == "json" else _page(looked):
        typer.echo(text)
    return bool(looked.findings or looked.not_utf8)


def _refuse_other_options(context: typer.Context) -> None:
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in _PARAMETERS:
            raise UsageError(f"--secrets looks for secrets only, and {parameter.opts[0]} has no use", "leave it out")


def _is_own(source: TraceSource) -> bool:
    try:
        first = source.first_object()
    except NotThisFormatError:
        return False
    return HEADER in first or any(isinstance(first.get(name), str) for name in ("segment", "request"))


def _add(scan: Scan, line: int, content: bytes) -> None:
    try:
        values = orjson.loads(content)
    except orjson.JSONDecodeError:
        values = None
    if isinstance(values, dict | list):
        scan.add_object(line, values if isinstance(values, dict) else {"": values})
    else:
        scan.add_text(line, content.decode(errors="replace"))


def _page(looked: _Looked) -> Iterator[str]:
    looked_at = counted(looked.records, looked.unit)
    if looked.findings:
        yield visible(f"{looked.name}: do not share this file as it is ({looked_at})")
        yield from _table(looked)
    elif not looked.not_utf8:
        yield visible(f"{looked.name}: nothing was found in {looked_at} by {', '.join(looked.detectors)}")
    else:
        yield visible(f"{looked.name}: do not share this file before all of it was looked at ({looked_at})")
    if looked.not_utf8:
        yield (
            f"{counted(looked.not_utf8, 'line')} not in UTF-8, of which only what is ASCII was looked at: convert the "
            "file to UTF-8, and look again"
        )
    if looked.unit == "line":
        yield "Every string of the file was looked at, also what no replay uses."
    yield f"The detectors can miss things: {NOT_LOOKED_FOR}."
    if looked.findings and looked.name != _STANDARD_INPUT:
        yield f"next: kvaudit record import {shlex.quote(looked.name)} --redact -o redacted.jsonl.gz"


def _table(looked: _Looked) -> Iterator[str]:
    width = max(8, *(len(finding.detector) for finding in looked.findings))
    yield f"{'detector':<{width}}  {'values':>7}  {'places':>7}  {f'{looked.unit}s':>8}"
    for finding in looked.findings:
        counts = (len(finding.values), finding.places, finding.records)
        yield "  ".join(
            [f"{finding.detector:<{width}}", *(f"{n:>{w},}" for n, w in zip(counts, (7, 7, 8), strict=True))]
        )
        for example in finding.examples.values():
            yield visible(f"  {example.masked}  {example.place}")
        if more := len(finding.values) - len(finding.examples):
            yield f"  and {counted(more, 'more value')}"


def _json(looked: _Looked) -> Iterator[str]:
    data = {
        "secrets_version": REPORT_VERSION,
        "trace": visible(looked.name),
        "unit": looked.unit,
        "records": looked.records,
        "lines_not_utf8": looked.not_utf8,
        "detectors": looked.detectors,
        "findings": [_finding(finding) for finding in looked.findings],
    }
    yield orjson.dumps(data, option=orjson.OPT_INDENT_2).decode()


def _finding(finding: Finding) -> dict[str, object]:
    return {
        "detector": finding.detector,
        "values": len(finding.values),
        "places": finding.places,
        "records": finding.records,
        "examples": [{"place": one.place, "masked": one.masked} for one in finding.examples.values()],
    }
