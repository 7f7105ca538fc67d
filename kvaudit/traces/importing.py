"""Several files and folders, each in its own format, as the requests of one trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import Request, Trace
from kvaudit.traces import UnknownFormatError, read_as
from kvaudit.traces.foreign import (
    EMPTY_ANSWERS,
    LEFT_OUT,
    NOTES,
    WITH_TOOLS,
    LeftOut,
    NothingToReplayError,
    Tally,
    by_time,
)
from kvaudit.traces.hash_only import HashesOnlyError
from kvaudit.traces.native import NAME as NATIVE
from kvaudit.traces.results import FORMAT as BATCH
from kvaudit.traces.results import ResultsOnlyError
from kvaudit.traces.source import open_source

_NAMED_BY_PLACE = re.compile(r"(?:line|entry|row|message|payload)-\d+(?:-\d+)?")

_OF_ONE_FILE = ("kvaudit_trace", "records", LEFT_OUT, NOTES, WITH_TOOLS, EMPTY_ANSWERS)


@dataclass(slots=True)
class ImportedFile:
    """What came of one file. `refusal` says why nothing was taken from a file of a folder."""

    name: str
    format: str = ""
    header: Mapping[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    records: int = 0
    left_out: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusal: str | None = None

    def as_data(self) -> dict[str, object]:
        """For the header of the trace that is written."""
        told = {"left_out": self.left_out, "notes": self.notes, "refusal": self.refusal}
        file = {"file": Path(self.name).name, "format": self.format, "records": self.records}
        requests = {"requests": len(self.requests), **self.counts}
        return file | requests | {name: value for name, value in told.items() if value}


@dataclass(frozen=True, slots=True)
class Imported:
    """`requests` in the order in which they are replayed. `notes` are on all files together."""

    requests: list[Request]
    files: list[ImportedFile]
    notes: list[str]

    def header(self) -> dict[str, object]:
        """How the trace was made. The header of a trace that is imported alone is kept."""
        only = self.files[0].header if len(self.files) == 1 else {}
        kept = {name: value for name, value in only.items() if name not in _OF_ONE_FILE}
        header = {"source": [Path(file.name).name for file in self.files], **kept}
        if len(self.files) == 1 and self.files[0].format == NATIVE:
            return header
        return header | {"imported": [file.as_data() for file in self.files]}


def import_files(
    paths: Sequence[Path],
    format: str | None = None,  # noqa: A002
    leave: Path | None = None,
    *,
    keep_parts: bool = False,
) -> Imported:
    """Read files, and every file of folders in the order of their paths, `leave` not among them.

    With `keep_parts`, every part of a chat message's content is a segment.

    Raises TraceError for a file that is named and holds nothing to replay, for one of a known format that is broken,
    and where nothing is left.
    """
    failures: dict[str, str] = {}
    named = list(_files(paths, leave))
    files = [_read(path, format, failures, in_folder=in_folder, keep_parts=keep_parts) for path, in_folder in named]
    _leave_out_failures(files, failures)
    if len(files) > 1:
        _make_ids_distinct(files)
    requests = [request for file in files for request in file.requests]
    if not requests:
        raise TraceError(f"nothing can be replayed of {', '.join(map(str, paths))}", _why_nothing(files))
    notes = []
    if len(files) > 1 and any(request.timestamp is not None for request in requests):
        requests, note = by_time(requests, "the files")
        notes = [note] if note else []
    return Imported([replace(request, ordinal=at) for at, request in enumerate(requests)], files, notes)


def _files(paths: Iterable[Path], leave: Path | None) -> Iterator[tuple[Path, bool]]:
    """(file, whether a folder was named in its place)."""
    left = leave.resolve() if leave is not None else None
    for path in paths:
        if str(path) == "-" or not path.is_dir():
            yield path, False
            continue
        inside = sorted(
            file
            for file in path.rglob("*")
            if file.is_file()
            and file.resolve() != left
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not inside:
            raise TraceError(f"{path} is a folder without files")
        yield from ((file, True) for file in inside)


def _read(
    path: Path,
    format: str | None,  # noqa: A002
    failures: dict[str, str],
    *,
    in_folder: bool,
    keep_parts: bool,
) -> ImportedFile:
    with open_source(path) as opened:
        source = replace(opened, keeps_parts=keep_parts)
        if in_folder and source.is_empty():
            return ImportedFile(source.name, refusal="it is empty")
        try:
            name, trace = read_as(source, format)
        except ResultsOnlyError as results:
            failures |= results.failures
            return ImportedFile(source.name, BATCH, notes=["holds results, no prompts"])
        except NothingToReplayError as nothing:
            if not in_folder:
                raise
            return ImportedFile(source.name, format or "", records=nothing.tally.total, left_out=nothing.tally.rows())
        except (UnknownFormatError, HashesOnlyError) as refusal:
            if not in_folder:
                raise
            return ImportedFile(source.name, refusal=refusal.message.removeprefix(f"{source.name} is "))
    return _taken(source.name, name, trace)


def _taken(name: str, format: str, trace: Trace) -> ImportedFile:  # noqa: A002
    told: Mapping[str, Any] = trace.header if format != NATIVE else {}
    return ImportedFile(
        name,
        format,
        trace.header,
        list(trace.requests),
        told.get("records", len(trace.requests)),
        list(told.get(LEFT_OUT, ())),
        {count: told[count] for count in (WITH_TOOLS, EMPTY_ANSWERS) if count in told},
        list(told.get(NOTES, ())),
    )


def _leave_out_failures(files: Iterable[ImportedFile], failures: Mapping[str, str]) -> None:
    for file in (file for file in files if file.format == BATCH):
        _drop(file, {id(request): failures.get(request.request_id) for request in file.requests})


def _make_ids_distinct(files: Iterable[ImportedFile]) -> None:
    """Places are named with their file; an id that another file has is a duplicate where the prompt is the same."""
    seen: dict[str, Request] = {}
    for file in files:
        reasons: dict[int, str | None] = {}
        for at, request in enumerate(file.requests):
            same = seen.get(request.request_id)
            if same is not None and _prompt(same) == _prompt(request) and not _is_place(request):
                reasons[id(request)] = "has an id and a prompt that came before in another file"
                continue
            if same is not None or _is_place(request):
                request = file.requests[at] = replace(request, request_id=_distinct(file, request, seen))
            seen[request.request_id] = request
        _drop(file, reasons)


def _is_place(request: Request) -> bool:
    return _NAMED_BY_PLACE.fullmatch(request.request_id) is not None


def _prompt(request: Request) -> list[str]:
    return [segment.content_id for segment in request.segments]


def _distinct(file: ImportedFile, request: Request, seen: Mapping[str, Request]) -> str:
    name = f"{Path(file.name).name}:{request.request_id}"
    number = 1
    while name in seen:
        number += 1
        name = f"{Path(file.name).name}-{number}:{request.request_id}"
    return name


def _drop(file: ImportedFile, reasons: Mapping[int, str | None]) -> None:
    """Leave out the requests that have a reason, by their identity."""
    tally = Tally("request")
    for number, request in enumerate(file.requests, start=1):
        if reason := reasons.get(id(request)):
            tally.add(LeftOut(number if request.line is None else request.line, reason, request.request_id))
    file.requests = [request for request in file.requests if not reasons.get(id(request))]
    file.left_out += tally.rows()


def _why_nothing(files: Iterable[ImportedFile]) -> str | None:
    reasons = [f"{Path(file.name).name}: {file.refusal}" for file in files if file.refusal]
    return "; ".join(reasons[:3]) or None
