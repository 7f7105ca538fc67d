"""A file as numbered lines: decompressed, read from its beginning as often as asked, errors with file and line."""

from __future__ import annotations

import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from kvaudit.errors import TraceError
from kvaudit.traces.decompress import Decompressed

LONGEST_LINE = 1 << 28
"""Bytes. A longer line is a decompression bomb, or the file is not made of lines."""

_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER = 1 << 20
_JSON_NAMES = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false"}


class NotThisFormatError(TraceError):
    """A reader's refusal of a source that is not of its format, before it has taken anything from it."""


@dataclass(frozen=True, slots=True)
class TraceSource:
    """`name` is what errors call the file, `path` where its bytes are.

    `keeps_parts`: readers of chats give every part of a message's content as a segment, not the message as one.
    """

    name: str
    path: Path
    keeps_parts: bool = False

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number from 1, line with its end) from the beginning, decompressed, without a byte order mark."""
        number = 0
        try:
            with _decompressed(self.path) as stream:
                while line := stream.readline(LONGEST_LINE + 1):
                    number += 1
                    if len(line) > LONGEST_LINE:
                        raise self.error(number, f"longer than {LONGEST_LINE >> 20} MiB")
                    yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        except OSError as error:
            raise self.error(number + 1, f"cannot be read: {_reason(error)}") from error

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, JSON object) of every line that is not blank."""
        for number, line in self.lines():
            if not is_blank(line):
                yield number, self.object_of(number, line)

    def object_of(self, number: int, line: bytes) -> dict[str, Any]:
        """The JSON object that a line holds. Raises TraceError where it holds anything else."""
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise self.error(number, _broken(line, error), "each line holds one whole JSON object") from error
        if type(value) is not dict:
            raise self.error(number, f"not a JSON object but {_JSON_NAMES.get(type(value), 'null')}")
        return value

    def first_object(self) -> dict[str, Any]:
        """The first object, for readers to tell their format by. Raises NotThisFormatError where there is none."""
        try:
            for _, first in self.objects():
                return first
        except TraceError as error:
            raise NotThisFormatError(error.message.removeprefix(f"{self.name}, "), error.hint) from error
        raise NotThisFormatError("it is empty")

    def head(self, size: int) -> bytes:
        """Up to `size` decompressed bytes from the beginning, fewer where no more can be read."""
        try:
            with _decompressed(self.path) as stream:
                return stream.read1(size)
        except OSError:
            return b""

    def is_empty(self) -> bool:
        return all(is_blank(line) for _, line in self.lines())

    def error(self, line: int, what: str, hint: str | None = None) -> TraceError:
        return TraceError(f"{self.name}, line {line}: {what}", hint)


def name_of(path: Path) -> str:
    """What a file is called wherever something is said of it."""
    return "standard input" if str(path) == "-" else str(path)


def is_blank(line: bytes) -> bool:
    return not line or line.isspace()


@contextmanager
def open_source(path: Path) -> Iterator[TraceSource]:
    """The file at `path`; `-` is standard input. What can be read only once (a pipe) is copied to a temporary file.

    Raises TraceError for a file that is missing, a folder or not readable.
    """
    if str(path) == "-":
        if sys.stdin is None:
            raise TraceError("standard input is closed", "give a file, or pipe one in")
        with _copied(sys.stdin.buffer, name_of(path)) as source:
            yield source
        return
    with _opened(path) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            with _copied(stream, name_of(path)) as source:
                yield source
            return
    yield TraceSource(name_of(path), path)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise TraceError(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise TraceError(f"{path} is a folder", "name the file in it") from error
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} cannot be opened: {_reason(error)}") from error


@contextmanager
def _copied(stream: BinaryIO, name: str) -> Iterator[TraceSource]:
    with tempfile.NamedTemporaryFile(prefix="kvaudit-") as copy:
        try:
            shutil.copyfileobj(stream, copy, _BUFFER)
            copy.flush()
        except OSError as error:
            raise TraceError(f"{name} cannot be read: {_reason(error)}") from error
        yield TraceSource(name, Path(copy.name))


@contextmanager
def _decompressed(path: Path) -> Iterator[io.BufferedReader[Any]]:
    with io.BufferedReader(path.open("rb", buffering=0), _BUFFER) as stream:
        head = stream.peek(4)
        codec = next((codec for magic, codec in _CODECS.items() if head.startswith(magic)), None)
        if codec is None:
            yield stream
            return
        with io.BufferedReader(Decompressed(stream, codec), _BUFFER) as plain:
            yield plain


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _broken(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text = line.decode()
    except UnicodeDecodeError as undecodable:
        return f"not UTF-8 at byte {undecodable.start + 1}"
    return f"broken JSON at character {min(error.pos, len(text.rstrip())) + 1}: {error.msg}"
