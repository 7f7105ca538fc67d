"""`kvaudit record`: make a trace, out of an event table or out of what a service was asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.cli import redacting
from kvaudit.cli.record_import import EXAMPLES as IMPORT_EXAMPLES
from kvaudit.cli.record_import import import_trace
from kvaudit.cli.record_proxy import EXAMPLES as PROXY_EXAMPLES
from kvaudit.cli.record_proxy import proxy
from kvaudit.cli.recorded import counted, refuse_to_replace_input, say, say_written
from kvaudit.errors import UsageError
from kvaudit.records import DEFAULT_MAX_TOKENS

if TYPE_CHECKING:
    from kvaudit.records import Request
    from kvaudit.traces.events import EventColumns
    from kvaudit.traces.rolling import Rolling

app = typer.Typer(no_args_is_help=True, help="Make a trace to replay.")

_ROLLING_EXAMPLES = """\b
Examples:
  kvaudit record rolling prices.csv --window 8 -o trace.jsonl.gz
  kvaudit record rolling prices.csv --key symbol --time date --document '{date},{symbol},{close}\\n' \\
      --question '\\n{date},{symbol},' --answer '{close}' -o trace.jsonl.gz
  kvaudit record rolling prices.csv news.jsonl --time date --document 'news={date}: {title}\\n' -o trace.jsonl.zst

\b
A template is text with column names in braces: {close} stands for the row's value,
{{ and }} are braces, and nothing else is evaluated. In every text \\n, \\t, \\r and \\\\
are line end, tab, carriage return and backslash.
"""

_Output = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="TRACE", help="The trace to write; .gz and .zst at its end compress it."),
]


@app.command(epilog=_ROLLING_EXAMPLES)
def rolling(
    events: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVENTS...", help="CSV, JSON lines or Parquet, - for standard input. Several: one channel each."
        ),
    ],
    output: _Output,
    window: Annotated[int, typer.Option(min=1, help="Documents in the window.")] = 84,
    stride: Annotated[int, typer.Option(min=1, help="Documents that move out and in before each request.")] = 1,
    key: Annotated[str | None, typer.Option(metavar="COLUMN", help="One window for each value of this column.")] = None,
    time: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Interleave channels and keys by this time.")
    ] = None,
    channel: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column that names a row's channel. [default: the file]")
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What stands first in a prompt. [default: the columns, or nothing]"),
    ] = None,
    document: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CHANNEL=]TEMPLATE", help="How a row becomes a document. [default: its values with commas]"
        ),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[CHANNEL=]TEMPLATE", help="How a row is asked for. [default: the row up to its last column]"
        ),
    ] = None,
    answer: Annotated[
        list[str] | None,
        typer.Option(metavar="[CHANNEL=]TEMPLATE", help="The right answer. [default: the last column]"),
    ] = None,
    separator: Annotated[
        str, typer.Option(metavar="TEXT", help="What stands before each document and the question.")
    ] = " # # ",
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = DEFAULT_MAX_TOKENS,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help=r"Where an answer ends; may be given again. [default: \n]"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many requests.")] = None,
    seed: Annotated[int, typer.Option(help="Seeds which observation a request asks for.")] = 0,
    redact: redacting.Redact = False,
    redact_only: redacting.RedactOnly = None,
    redact_pattern: redacting.RedactPatterns = None,
) -> None:
    """Record the rolling agent: a window of documents that moves over an event table, a question at every step."""
    from kvaudit.traces.events import EventColumns
    from kvaudit.traces.rolling import Rolling
    from kvaudit.traces.templates import unescape

    columns = EventColumns(key, time, channel, document or (), question or (), answer or ())
    settings = Rolling(
        window=window,
        stride=stride,
        instruction=unescape(instruction or ""),
        separator=unescape(separator),
        max_tokens=max_tokens,
        stop=("\n",) if stop is None else tuple(unescape(text) for text in stop if text),
        limit=limit,
        seed=seed,
    )
    redaction = redacting.asked(redact, redact_only, redact_pattern)
    headings_instruct = instruction is None and not document
    _record_rolling(events, columns, settings, output, redaction, headings_instruct=headings_instruct)


def _record_rolling(
    events: Sequence[Path],
    columns: EventColumns,
    settings: Rolling,
    output: Path,
    redaction: redacting.Redaction | None,
    *,
    headings_instruct: bool,
) -> None:
    if settings.stride > settings.window:
        raise UsageError(
            f"--stride {settings.stride} is larger than --window {settings.window}",
            "windows overlap when it is smaller",
        )
    refuse_to_replace_input(events, output)
    from kvaudit.traces.events import read_events
    from kvaudit.traces.rolling import rolling_requests, too_short
    from kvaudit.traces.writer import write_trace

    with redacting.hiding(redaction):
        found = read_events(events, columns, only_key="rolling")
    if headings_instruct:
        settings = replace(settings, instruction=found.headings)
    short = too_short(found.streams, settings)
    header = {"workload": "rolling", "source": [path.name for path in events], **_described(settings, columns)}
    requests: Iterable[Request] = rolling_requests(found.streams, settings)
    if redaction:
        requests, header = redaction.apply(list(requests), header)
    written = write_trace(output, requests, header)
    if short:
        few = redacting.shown(redaction, _few(short))
        say(f"left out {counted(len(short), 'key')} with fewer than {settings.fewest_events} events: {few}")
    if redaction:
        redaction.say()
    say_written(output, written)


app.command(epilog=PROXY_EXAMPLES)(proxy)


app.command(name="import", epilog=IMPORT_EXAMPLES)(import_trace)


def _described(settings: Rolling, columns: EventColumns) -> dict[str, object]:
    """The settings for the trace's header, those that were given."""
    given = {name: value for name, value in asdict(columns).items() if value}
    return given | {name: value for name, value in asdict(settings).items() if value is not None}


def _few(names: Sequence[str], at_most: int = 5) -> str:
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most:,} more"
