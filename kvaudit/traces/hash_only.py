"""Traces that hold lengths and hashes of prefixes in place of prompts: Mooncake's lines and WEKA's sessions.

They tell what a prefix cache could have reused, and `kvaudit inspect` says it. Without the prompts no model can be
asked, and no answer audited: a replay and an import refuse them.

Mooncake (arXiv 2407.00079, section 4): `timestamp` in milliseconds, `hash_ids` for blocks of 512 tokens, each hashed
together with its prefix, the last block too where it is cut short; some tools leave that one out. WEKA
(callanjfox/agentic-coding-analysis, docs/TRACE_FORMAT.md): a session with its `block_size`, `t` in seconds since it
began, `hash_ids` for full blocks only, each hashed together with the block before it. Ids are one namespace a session,
its sub-agents among them, save where `hash_id_scope` is `global`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from kvaudit.errors import TraceError
from kvaudit.records import HashedRequest, Trace
from kvaudit.traces.fields import Fields
from kvaudit.traces.folders import files_in, reason_of
from kvaudit.traces.logs import LINE, Log, Record, first_key, first_record, is_document, read_log, whole_document
from kvaudit.traces.shapes import as_object, as_objects
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut, Tally, told_left_out

MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}\n'
WEKA = (
    '{"id": "s", "models": ["m"], "block_size": 64, "requests": [{"t": 0.0, "type": "n", "in": 600, "out": 9, '
    '"hash_ids": [1, 2]}]}'
)
MOONCAKE_BLOCK = 512

_WEKA_KEYS = ("id", "models", "block_size", "requests", "hash_id_scope", "tool_tokens", "system_tokens")
_MOST_TOKENS = 2**31 - 1
_DEEPEST = 20
"""Sub-agents in sub-agents."""

HashFormat = Literal["mooncake", "weka"]
_NAMES: dict[HashFormat, str] = {"mooncake": "Mooncake", "weka": "WEKA"}


class HashesOnlyError(TraceError):
    """A trace without prompts. `format` is the name under which `plugins.py` lists its format."""

    def __init__(self, name: str, format: HashFormat) -> None:  # noqa: A002
        super().__init__(
            f"{name} is a {_NAMES[format]} trace: lengths and hashes of prefixes without the prompts, so that no "
            "answer can be audited",
            "kvaudit inspect says what a prefix cache could reuse of it; for an audit record the prompts too, with "
            "kvaudit record proxy or from a log that holds them",
        )
        self.format = format


@dataclass(frozen=True, slots=True)
class HashedTrace:
    """`requests` as they are read, those of one local namespace together. `block_tokens` is what an id stands for.

    `is_stated`: whether the trace itself gives that size. `tally` counts what was left out, and its notes say how the
    rest was taken; it is whole when the requests have been taken.
    """

    name: str
    block_tokens: int
    is_stated: bool
    requests: Iterator[HashedRequest]
    tally: Tally

    @property
    def notes(self) -> list[str]:
        return self.tally.notes


def read_mooncake(source: TraceSource) -> Trace:
    """Raises HashesOnlyError for a Mooncake trace, NotThisFormatError for any other."""
    if not {"hash_ids", "input_length"} <= first_record(source).keys():
        raise NotThisFormatError("the first line has no 'hash_ids' and 'input_length'")
    raise HashesOnlyError(source.name, "mooncake")


def read_weka(source: TraceSource) -> Trace:
    """Raises HashesOnlyError for a WEKA trace, NotThisFormatError for any other."""
    _, first = _weka_log(source)
    _require_hashes(first)
    raise HashesOnlyError(source.name, "weka")


def open_hashes(source: TraceSource, format: HashFormat) -> HashedTrace:  # noqa: A002
    """The requests of a trace that one of the readers above has told.

    Raises TraceError, also while they are taken, for a broken file and for one without a single sound request.
    """
    if format == "mooncake":
        log, block_tokens = read_log(source), MOONCAKE_BLOCK
        found = _mooncake(source, log)
    else:
        log, first = _weka_log(source)
        block_tokens = _block_size(Fields(source, 1, first, "the session"))
        found = _weka(source, log, block_tokens)
    requests = _some(source.name, found, log.tally)
    return HashedTrace(_NAMES[format], block_tokens, format == "weka", requests, log.tally)


def open_hash_folder(folder: Path) -> HashedTrace:
    """The sessions of a folder of WEKA traces, in the order of its files. Other files are left out.

    Raises TraceError where no file is one, and what `open_hashes` raises.
    """
    tally = Tally("file")
    sessions = _folder_sessions(folder, tally)
    number, first = next(sessions, (0, None))
    if first is None:
        raise TraceError(
            f"{folder} is a folder, and none of its files is a WEKA trace",
            f"kvaudit record import {folder} -o TRACE makes one trace of logs with prompts",
        )
    source = TraceSource(str(folder), folder)
    block_tokens = _block_size(Fields(source, number, first, "the session"))
    found = _weka(source, Log(tally.unit, chain([(number, first)], sessions), tally), block_tokens)
    return HashedTrace(_NAMES["weka"], block_tokens, True, _some(source.name, found, tally), tally)


def _folder_sessions(folder: Path, tally: Tally) -> Iterator[tuple[int, Record]]:
    """(number of the file from 1, session), the first with a size of its blocks."""
    for number, path in enumerate(files_in(folder), start=1):
        source = TraceSource(str(path), path)
        try:
            log, first = _weka_log(source)
            _require_hashes(first)
            _block_size(Fields(source, 1, first, "the session"))
            yield from ((number, session) for _, session in log.records)
        except NotThisFormatError:
            tally.add(LeftOut(number, "is no WEKA trace", path.name))
        except TraceError as refusal:
            tally.add(LeftOut(number, reason_of(refusal, source.name), path.name))
        else:
            tally.notes += [f"{path.name}: left out {told_left_out(row)}" for row in log.tally.rows()]


def _require_hashes(session: Record) -> None:
    if not any("hash_ids" in entry.values for entry in _entries(session, "")):
        raise NotThisFormatError("it has no 'requests' with 'hash_ids'")


def _some(name: str, requests: Iterator[HashedRequest], tally: Tally) -> Iterator[HashedRequest]:
    first = next(requests, None)
    if first is None:
        reasons = "; ".join(map(told_left_out, tally.rows()))
        raise TraceError(f"{name} holds no request with its hashes" + (f": {reasons}" if reasons else ""))
    yield first
    yield from requests


def _mooncake(source: TraceSource, log: Log) -> Iterator[HashedRequest]:
    tally, unit = log.tally, log.tally.unit
    ordinal, latest, earlier = 0, -math.inf, 0
    for place, record in log.records:
        fields = Fields(source, place, record, "the request")
        try:
            tokens, ids, answer = _measures(fields, record, "input_length", "output_length")
            time, session = fields.number("timestamp"), fields.name("session_id")
        except TraceError as refusal:
            tally.add(_left_out(source, place, refusal))
            continue
        seconds = None if time is None else time / 1000
        earlier += seconds is not None and seconds < latest
        latest = max(latest, latest if seconds is None else seconds)
        line = place if unit == LINE else None
        yield HashedRequest(f"{unit}-{place}", ordinal, tokens, ids, "", session, answer, seconds, line)
        ordinal += 1
    if earlier:
        tally.notes.append(
            f"{earlier:,} requests have earlier times than one before them: they stay in the order of the file"
        )


def _weka(source: TraceSource, log: Log, block_tokens: int) -> Iterator[HashedRequest]:
    tally, unit = log.tally, log.tally.unit
    ordinal, sessions = 0, 0
    for number, (place, session) in enumerate(log.records, start=1):
        about = Fields(source, place, session, "the session")
        try:
            if (size := _block_size(about)) != block_tokens:
                raise about.error(f"has blocks of {size:,} tokens, and the first one of {block_tokens:,}")
            name = about.name("id") or f"{unit}-{place}"
        except TraceError as refusal:
            tally.add(_left_out(source, place, refusal))
            continue
        sessions += 1
        namespace = "" if session.get("hash_id_scope") == "global" else str(number)
        line = place if unit == LINE else None
        for entry in _in_time(list(_entries(session, name))):
            fields = Fields(source, place, entry.values, "the request")
            try:
                tokens, ids, answer = _measures(fields, entry.values, "in", "out")
            except TraceError as refusal:
                tally.add(_left_out(source, place, refusal, entry.request_id))
                continue
            yield HashedRequest(
                entry.request_id, ordinal, tokens, ids, namespace, entry.session, answer, entry.time, line
            )
            ordinal += 1
    if sessions > 1:
        tally.notes.append(f"{sessions:,} sessions have no common clock: they are served one after another")


def _measures(fields: Fields, values: Record, prompt: str, answer: str) -> tuple[int, tuple[int | str, ...], int]:
    """Tokens of the prompt, ids of its blocks, tokens of the answer (0 where nothing is said of it)."""
    if values.get("hash_ids") is None:
        raise fields.error("has no 'hash_ids'")
    ids = fields.list("hash_ids")
    if not set(map(type, ids)) <= {int, str}:
        raise fields.error("has 'hash_ids' that are neither whole numbers nor texts")
    tokens, answered = fields.count(prompt), fields.number(answer) or 0
    if tokens is None:
        raise fields.error(f"has no {prompt!r}")
    if tokens > _MOST_TOKENS or not 0 <= answered <= _MOST_TOKENS:
        raise fields.error(f"has an {prompt!r} or {answer!r} that is no length of a text")
    return tokens, tuple(ids), int(answered)


def _left_out(source: TraceSource, place: int, refusal: TraceError, detail: str = "") -> LeftOut:
    reason = refusal.message.removeprefix(f"{source.name}, line {place}: ").removeprefix("the request ")
    return LeftOut(place, reason, detail)


def _block_size(session: Fields) -> int:
    size = session.count("block_size")
    if size is None:
        raise session.error("has no 'block_size'")
    return size


def _weka_log(source: TraceSource) -> tuple[Log, Record]:
    """The sessions, one a file or one a line, and the first of them. Raises NotThisFormatError."""
    if first_key(source) not in _WEKA_KEYS:
        raise NotThisFormatError(f"it does not begin with {' or '.join(map(repr, _WEKA_KEYS))}")
    if is_document(source):
        session = as_object(whole_document(source))
        return Log(LINE, iter([(1, session)])), session
    return read_log(source), first_record(source)


@dataclass(frozen=True, slots=True)
class _Entry:
    """`time` in seconds since the session began."""

    request_id: str
    session: str
    time: float | None
    values: Record


def _entries(session: Record, name: str, begins: float = 0.0, depth: int = 0) -> Iterator[_Entry]:
    """The requests of a session and of its sub-agents, which have their times since they or the session began."""
    for index, values in enumerate(as_objects(session.get("requests")), start=1):
        time = _time(values)
        if "requests" not in values:
            yield _Entry(f"{name}:{index}", name, None if time is None else begins + time, values)
        elif depth < _DEEPEST:
            starts = [start for inner in as_objects(values["requests"]) if (start := _time(inner)) is not None]
            counts_anew = time is not None and bool(starts) and min(starts) < time
            agent = f"{name}/{values.get('agent_id') or index}"
            yield from _entries(values, agent, begins + (time or 0.0) * counts_anew, depth + 1)


def _time(values: Record) -> float | None:
    time: Any = values.get("t")
    return float(time) if type(time) in (int, float) and math.isfinite(time) else None


def _in_time(entries: list[_Entry]) -> list[_Entry]:
    times = [entry.time for entry in entries if entry.time is not None]
    if len(times) < len(entries) or times == sorted(times):
        return entries
    return sorted(entries, key=lambda entry: entry.time or 0.0)
