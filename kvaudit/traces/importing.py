"""Several files and folders, each in its own format, as the requests of one trace."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import Request, Trace
from kvaudit.traces import read_as
from kvaudit.traces.folders import files_in, reason_of
from kvaudit.traces.foreign import (
    EMPTY_ANSWERS,
    LEFT_OUT,
    NOTES,
    WITH_TOOLS,
    NothingToReplayError,
    by_time,
)
from kvaudit.traces.hash_only import HashesOnlyError
from kvaudit.traces.logs import LINE
from kvaudit.traces.native import NAME as NATIVE
from kvaudit.traces.repeats import Seen, is_place, name_over_files
from kvaudit.traces.results import FORMAT as BATCH
from kvaudit.traces.results import ResultsOnlyError
from kvaudit.traces.source import name_of, open_source
from kvaudit.traces.tally import LeftOut, Tally, told_left_out

_RESULTS = "holds results, no prompts"
_REASONS_SHOWN = 3
_ORIGINS = ("source", "imported")
_OF_ONE_FILE = ("kvaudit_trace", "records", LEFT_OUT, NOTES, WITH_TOOLS, EMPTY_ANSWERS)


@dataclass(slots=True)
class ImportedFile:
    """What came of one file. `refusal` says why nothing was taken from a file of a folder; its `format` is known only
    where the file holds hashes in place of prompts. `failures` says why requests of another file failed, by their ids.
    """

    name: str
    format: str = ""
    header: Mapping[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    records: int = 0
    left_out: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    refusal: str | None = None
    failures: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def made(self) -> dict[str, object]:
        """What its header says of how it was made."""
        return {name: value for name, value in self.header.items() if name not in _OF_ONE_FILE}

    def as_data(self, made: Mapping[str, object] | None = None) -> dict[str, object]:
        """For the header of the trace that is written, with what of `made` is said of this file alone."""
        told = {"left_out": self.left_out, "notes": self.notes, "refusal": self.refusal, "header": made}
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
        """How the trace was made: of one file, what its header says; of several, that in which theirs agree, and the
        rest file by file.
        """
        names = [Path(file.name).name for file in self.files]
        if len(self.files) == 1:
            (only,) = self.files
            header = {"source": names, **only.made}
            return header if only.format == NATIVE else header | {"imported": [only.as_data()]}
        agreed = _agreed(self.files)
        files = [
            file.as_data({name: value for name, value in file.made.items() if name not in agreed})
            for file in self.files
        ]
        return {"source": names, **agreed, "imported": files}


def _agreed(files: Iterable[ImportedFile]) -> dict[str, object]:
    """What the headers of all files with requests say alike."""
    first, *others = [file.made for file in files if file.requests]
    return {
        name: value
        for name, value in first.items()
        if name not in _ORIGINS and all(name in other and other[name] == value for other in others)
    }


def _differences(files: Sequence[ImportedFile]) -> list[str]:
    """The note on what the headers of files with requests do not say alike."""
    agreed = _agreed(files)
    names = {name for file in files if file.requests for name in file.made if name not in (*agreed, *_ORIGINS)}
    if not names:
        return []
    return [f"the files differ in how they were made ({', '.join(sorted(names))}): the header tells it of each file"]


def import_files(
    paths: Sequence[Path],
    format: str | None = None,  # noqa: A002
    leave: Path | None = None,
    *,
    keep_parts: bool = False,
) -> Imported:
    """Read files, and every file of folders in the order of their paths, `leave` not among them.

    With `keep_parts`, every part of a chat message's content is a segment.

    A file of a folder that cannot be read is left out, with its `refusal`. Raises TraceError for a file that is named
    and cannot be read or holds nothing to replay, and where nothing is left.
    """
    named, notes = _each_once(_files(paths, leave))
    files = [_read(path, format, in_folder=in_folder, keep_parts=keep_parts) for path, in_folder in named]
    _label(files)
    _leave_out_failures(files)
    if len(files) > 1:
        _make_ids_distinct(files)
    requests = [request for file in files for request in file.requests]
    if not requests:
        raise TraceError(f"nothing can be replayed of {', '.join(map(str, paths))}", _why_nothing(files))
    notes += _differences(files) if len(files) > 1 else []
    if len(files) > 1 and any(request.timestamp is not None for request in requests):
        requests, note = by_time(requests, "the files")
        notes += [note] if note else []
    return Imported([replace(request, ordinal=at) for at, request in enumerate(requests)], files, notes)


def _files(paths: Iterable[Path], leave: Path | None) -> Iterator[tuple[Path, bool]]:
    """(file, whether a folder was named in its place)."""
    for path in paths:
        if str(path) != "-" and path.is_dir():
            yield from ((file, True) for file in files_in(path, leave))
        else:
            yield path, False


def _each_once(files: Iterable[tuple[Path, bool]]) -> tuple[list[tuple[Path, bool]], list[str]]:
    """Every file once, however often and by whatever path it is named, and notes on those that are named again."""
    known: dict[tuple[int, int], Path] = {}
    once, notes = [], []
    for path, in_folder in files:
        identity = _identity(path)
        if identity is None or identity not in known:
            once.append((path, in_folder))
        elif path != known[identity]:
            notes.append(f"{path} is the same file as {known[identity]}: it is read once")
        else:
            notes.append(f"{path} is named more than once: it is read once")
        if identity is not None:
            known.setdefault(identity, path)
    return once, notes


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a regular file."""
    try:
        found = path.stat()
    except OSError:  # reading it says why
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _label(files: Sequence[ImportedFile]) -> None:
    """What a file is called in what is said of it: its name, or its path as given where another has that name."""
    names = Counter(Path(file.name).name for file in files)
    for file in files:
        name = Path(file.name).name
        file.label = name if names[name] == 1 else file.name


def _read(
    path: Path,
    format: str | None,  # noqa: A002
    *,
    in_folder: bool,
    keep_parts: bool,
) -> ImportedFile:
    name = name_of(path)
    try:
        with open_source(path) as opened:
            source = replace(opened, keeps_parts=keep_parts)
            if in_folder and source.is_empty():
                return ImportedFile(name, refusal="it is empty")
            return _taken(name, *read_as(source, format))
    except ResultsOnlyError as results:
        return ImportedFile(name, BATCH, notes=[_RESULTS], failures=results.failures)
    except NothingToReplayError as nothing:
        if not in_folder:
            raise
        return ImportedFile(name, format or "", records=nothing.tally.total, left_out=nothing.tally.rows())
    except TraceError as refusal:
        if not in_folder:
            raise
        return ImportedFile(
            name, refusal.format if isinstance(refusal, HashesOnlyError) else "", refusal=reason_of(refusal, name)
        )


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


def _leave_out_failures(files: Iterable[ImportedFile]) -> None:
    """A failed id is that of the one input that has it or, of several, of the one beside its results; else it stays."""
    inputs = [file for file in files if file.format == BATCH and file.requests]
    holders: dict[str, list[ImportedFile]] = {}
    for file in inputs:
        for request in file.requests:
            holders.setdefault(request.request_id, []).append(file)
    failed: dict[int, dict[str, str]] = {id(file): {} for file in inputs}
    for results in files:
        unclear = 0
        for name, failure in results.failures.items():
            having = holders.get(name, [])
            beside = [file for file in having if _folder(file) == _folder(results)]
            owners = having if len(having) == 1 else beside
            if len(owners) == 1:
                failed[id(owners[0])].setdefault(name, failure)
            unclear += len(having) > 1 and len(owners) != 1
        if unclear:
            results.notes.append(f"{unclear:,} failed here with an id that several inputs have: nothing is left out")
    for file in inputs:
        _drop(file, {id(request): failed[id(file)].get(request.request_id) for request in file.requests})


def _folder(file: ImportedFile) -> str:
    return os.path.dirname(os.path.abspath(file.name))


def _make_ids_distinct(files: Iterable[ImportedFile]) -> None:
    """Places are named with their file, and so are ids that an earlier file has for other requests (`repeats`)."""
    taken: set[str] = set()
    seen = Seen()
    for file in files:
        reasons: dict[int, str | None] = {}
        new: list[tuple[str, Request]] = []
        sources = _sources(file)
        for at, request in enumerate(file.requests):
            name = name_over_files(request, sources)
            if name is not None and seen.holds(name, request):
                reasons[id(request)] = "has an id and a prompt that came before in another file"
                continue
            if name is not None:
                new.append((name, request))
            if is_place(request.request_id) or request.request_id in taken:
                request = file.requests[at] = replace(request, request_id=_distinct(file, request, taken))
            taken.add(request.request_id)
        for name, request in new:
            seen.add(name, request)
        _drop(file, reasons)


def _sources(file: ImportedFile) -> Collection[str]:
    """The files of which a trace was imported: their names may stand before its ids."""
    sources = file.header.get("source") if file.format == NATIVE else None
    return {name for name in sources if type(name) is str} if type(sources) is list else ()


def _distinct(file: ImportedFile, request: Request, taken: Collection[str]) -> str:
    name = f"{Path(file.name).name}:{request.request_id}"
    number = 1
    while name in taken:
        number += 1
        name = f"{Path(file.name).name}-{number}:{request.request_id}"
    return name


def _drop(file: ImportedFile, reasons: Mapping[int, str | None]) -> None:
    """Leave out the requests that have a reason, by their identity."""
    by_line = all(request.line is not None for request in file.requests)
    tally = Tally(LINE if by_line else "request")
    for number, request in enumerate(file.requests, start=1):
        if reason := reasons.get(id(request)):
            tally.add(LeftOut((by_line and request.line) or number, reason, request.request_id))
    file.requests = [request for request in file.requests if not reasons.get(id(request))]
    file.left_out += tally.rows()


def _why_nothing(files: Sequence[ImportedFile]) -> str | None:
    """The first reasons, each with the first file that has it, and what the files are good for all the same."""
    names: dict[str, list[str]] = {}
    for file in files:
        if reason := _why_empty(file):
            names.setdefault(reason, []).append(file.label)
    told = [
        f"{first}{f' and {len(others):,} more' if others else ''}: {reason}"
        for reason, (first, *others) in list(names.items())[:_REASONS_SHOWN]
    ]
    if _RESULTS in names:
        told.append("import results with their input")
    if any(file.refusal and file.format for file in files):
        told.append("kvaudit inspect says what a prefix cache could reuse of hashes")
    return "; ".join(told) or None


def _why_empty(file: ImportedFile) -> str | None:
    if file.left_out:
        return f"left out {told_left_out(file.left_out[0])}"
    return file.refusal or next(iter(file.notes), None)
