"""Event streams out of event tables: rows rendered by templates, channels interleaved by time, one stream a key."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvaudit.errors import TraceError, UsageError
from kvaudit.traces.fields import brief
from kvaudit.traces.source import open_source
from kvaudit.traces.tables import Table, TextRow, read_table
from kvaudit.traces.templates import ChannelTemplates, Template


@dataclass(frozen=True, slots=True)
class Event:
    """A row as text. `when` orders events of different channels and keys; `timestamp` in seconds since 1970 (UTC)."""

    document: str
    question: str
    answer: str
    when: float
    timestamp: float | None


@dataclass(frozen=True, slots=True)
class EventColumns:
    """Which columns hold the key, the time and the channel, and the templates, as they were given."""

    key: str | None = None
    time: str | None = None
    channel: str | None = None
    document: Sequence[str] = ()
    question: Sequence[str] = ()
    answer: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Events:
    """`streams`: the events of each key, in their order. `headings`: the columns of each table, as its first line."""

    streams: dict[str, list[Event]]
    headings: str


class _Templates:
    """Document, question and answer template of each channel.

    By default a document is the row's values with commas, the question begins the row again up to its last column,
    and the answer is that column.
    """

    def __init__(self, columns: EventColumns, channels: bool) -> None:
        self._given = (
            ChannelTemplates("--document", columns.document, channels),
            ChannelTemplates("--question", columns.question, channels),
            ChannelTemplates("--answer", columns.answer, channels),
        )
        self._resolved: dict[tuple[str, str], list[Template]] = {}

    def of(self, channel: str, table: Table) -> list[Template]:
        key = (channel, table.source.name)
        if key not in self._resolved:
            *first, last = table.columns
            begun = [part for column in first for part in (("", column), (",", None))]
            defaults = (
                Template((*begun, ("", last), ("\n", None))),
                Template((("\n", None), *begun)),
                Template((("", last),)),
            )
            self._resolved[key] = [
                given.of(channel, table) or default for given, default in zip(self._given, defaults, strict=True)
            ]
        return self._resolved[key]

    def check_channels(self, known: Sequence[str]) -> None:
        channels = tuple(dict.fromkeys((*known, *(channel for channel, _ in self._resolved))))
        for given in self._given:
            given.check_channels(channels)


def read_events(paths: Sequence[Path], columns: EventColumns, only_key: str) -> Events:
    """The events of all tables, by key (`only_key` where no key column is given).

    Each file is a channel, unless a column holds it. The order inside a channel is that of its file.
    Raises TraceError with file and line for a bad row, UsageError for columns and options that do not fit.
    """
    several = len(paths) > 1
    if several and columns.time is None:
        raise UsageError("several tables are interleaved by time", "name the column that holds it: --time COLUMN")
    templates = _Templates(columns, several or columns.channel is not None)
    channels: dict[str, dict[str, list[Event]]] = {}
    headings = []
    names = _channel_names(paths)
    with ExitStack() as stack:
        for name, path in zip(names, paths, strict=True):
            table = read_table(stack.enter_context(open_source(path)))
            headings.append((f"{name}: " if several else "") + ",".join(table.columns) + "\n")
            for key, channel, event in _events(table, name, columns, templates):
                channels.setdefault(key or only_key, {}).setdefault(channel, []).append(event)
    templates.check_channels(names if columns.channel is None else ())
    streams = {key: list(heapq.merge(*lists.values(), key=_when)) for key, lists in channels.items()}
    if not streams:
        raise TraceError(f"{', '.join(map(str, paths))}: there are no rows")
    return Events(streams, "".join(headings))


def _when(event: Event) -> float:
    return event.when


def _channel_names(paths: Sequence[Path]) -> list[str]:
    names = [path.name.split(".")[0] for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two tables are called {twice!r}", "a table's file name is the name of its channel")
    return names


def _events(
    table: Table, name: str, columns: EventColumns, templates: _Templates
) -> Iterator[tuple[str | None, str, Event]]:
    """(key, channel, event) of every row."""
    for option, column in (("--key", columns.key), ("--time", columns.time), ("--channel", columns.channel)):
        if column is not None:
            table.require(column, option)
    for count, (number, row) in enumerate(table.rows):
        channel = name if columns.channel is None else _filled(table, number, row, columns.channel)
        document, question, answer = templates.of(channel, table)
        timestamp = None if columns.time is None else _timestamp(table, number, row[columns.time])
        event = Event(
            document=document.render(row),
            question=question.render(row),
            answer=answer.render(row),
            when=count if timestamp is None else timestamp,
            timestamp=timestamp,
        )
        if not event.document or not event.question:
            raise table.error(number, "the template gives no text for this row")
        yield (None if columns.key is None else _filled(table, number, row, columns.key)), channel, event


def _filled(table: Table, number: int, row: TextRow, column: str) -> str:
    if not row[column]:
        raise table.error(number, f"the column {column!r} is empty")
    return row[column]


def _timestamp(table: Table, number: int, text: str) -> float:
    """Seconds since 1970 of an ISO 8601 date or time (UTC where it names no zone), or such seconds as they are."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        pass
    else:
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not abs(seconds) < float("inf"):
        raise table.error(number, f"{brief(text)} is no time", "a time is ISO 8601, or in seconds since 1970")
    return seconds
