"""The file of a recording: one exchange a line, each line a write and, when compressed, a frame of its own.

A process that is killed loses what it had not written. A line that was cut off is taken away when the file is opened
to go on. A file that is deleted, moved or cut while it is recorded to is begun anew.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson

from kvaudit import __version__
from kvaudit.errors import KvauditError, TraceError
from kvaudit.traces.capture import HEADER, VERSION, is_header
from kvaudit.traces.damaged import Lost, readable_lines
from kvaudit.traces.source import is_blank

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_ZSTD_LEVEL = 3
_ELSEWHERE = "name another file with -o"
_CHANGED = "was changed by somebody else"


class RecordingError(KvauditError):
    """Something that passed through the proxy could not be written down."""

    exit_code = 3


class Capture:
    """An open capture, held against every other proxy by a lock on the file itself. Not safe for several threads."""

    def __init__(self, path: Path, upstream: str, say: Callable[[str], None]) -> None:
        """Raises TraceError for a file that is no capture or is in use, OSError for one that cannot be written."""
        self.path = path
        self._upstream, self._say = upstream, say
        self._compress = _compressor(path)
        self._descriptor, self._run, self._end = -1, 0, 0
        self._torn = False
        self._record_to(_locked(path))

    def current_run(self) -> int:
        """The run that the next line belongs to: how often recording to the file began, from 1.

        Where the file at the path is another one by now, or was changed, a new run begins there. Raises as the
        constructor does where it cannot.
        """
        if self._torn:
            self._mend()
        change = self._change()
        if change is not None:
            before = self._descriptor
            self._record_to(before if change == _CHANGED else _locked(self.path))
            if before != self._descriptor:
                os.close(before)
            self._say(f"WARNING: {self._told(change)}; recording goes on there, with a header of its own")
        return self._run

    def append(self, line: bytes) -> None:
        """Write a line with its end. Raises OSError, and leaves the file ending in a whole line, where it cannot."""
        data = self._compress(line)
        if self._torn:
            self._mend()
        try:
            _write(self._descriptor, data)
        except OSError:
            self._torn = True
            with suppress(OSError):
                self._mend()
            raise
        self._end += len(data)

    def close(self) -> None:
        if change := self._change():
            self._say(f"WARNING: {self._told(change)}")
        with suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _mend(self) -> None:
        os.ftruncate(self._descriptor, self._end)
        self._torn = False

    def _change(self) -> str | None:
        """What somebody else did to the file."""
        ours = os.fstat(self._descriptor)
        try:
            there = self.path.stat()
        except OSError:
            return "was deleted or moved"
        if not os.path.samestat(ours, there):
            return "was replaced by another file"
        return _CHANGED if ours.st_size != self._end else None

    def _told(self, change: str) -> str:
        return f"{self.path} {change} while it was recorded to: what was written before may no longer be in it"

    def _record_to(self, descriptor: int) -> None:
        """Begin a run behind what is whole in a file."""
        try:
            runs, end, ended = _whole_part(self.path, descriptor, self._say)
            header = self._compress((b"" if ended else b"\n") + _header(self._upstream))
            try:
                _write(descriptor, header)
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        except BaseException:
            if descriptor != self._descriptor:
                os.close(descriptor)
            raise
        self._descriptor, self._run, self._end = descriptor, runs + 1, end + len(header)


@contextmanager
def open_capture(path: Path, upstream: str, say: Callable[[str], None]) -> Iterator[Capture]:
    """A new capture, or one to go on with, held against every other proxy. `say` is told of what was lost of it.

    Raises TraceError for a file that is no capture, is in use or cannot be written.
    """
    if not path.parent.is_dir():
        raise TraceError(f"cannot record to {path}: there is no folder {path.parent}", "make it first")
    try:
        capture = Capture(path, upstream, say)
    except OSError as error:
        raise TraceError(f"cannot record to {path}: {error.strerror or error}", _ELSEWHERE) from error
    try:
        yield capture
    finally:
        capture.close()


def _locked(path: Path) -> int:
    """The file, open and locked. Raises OSError, TraceError for one that is in use or no file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise TraceError(f"cannot record to {path}: it is no regular file", _ELSEWHERE)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise TraceError(f"another proxy is recording to {path}", _ELSEWHERE) from error
        raise
    return descriptor


def _write(descriptor: int, data: bytes) -> None:
    written = os.write(descriptor, data)
    while written < len(data):  # a disk that is full takes a part first, then says so
        written += os.write(descriptor, data[written:])


def _header(upstream: str) -> bytes:
    header = {HEADER: VERSION, "made_by": f"kvaudit {__version__}", "upstream": upstream, "started": time.time()}
    return orjson.dumps(header, option=orjson.OPT_APPEND_NEWLINE)


def _compressor(path: Path) -> Callable[[bytes], bytes]:
    codec = _CODECS.get(path.suffix)
    if codec == "gzip":
        return lambda line: gzip.compress(line, mtime=0)
    if codec == "zstd":
        from zstandard import ZstdCompressor

        compress: Callable[[bytes], bytes] = ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress
        return compress
    return bytes


def _whole_part(path: Path, descriptor: int, say: Callable[[str], None]) -> tuple[int, int, bool]:
    """How often recording to a file began, where its last whole line ends, and whether that has a line's end.

    What stands behind, and nothing whole behind that, is taken away. Raises TraceError for what is no capture.
    """
    size = os.fstat(descriptor).st_size
    if not size:
        return 0, 0, True
    runs, end, ended, damaged = 0, size, True, 0
    codec = _CODECS.get(path.suffix)
    with os.fdopen(os.dup(descriptor), "rb") as file:
        for line in readable_lines(file, codec):
            if isinstance(line, Lost):
                damaged, end = damaged + line.end - line.start, line.start if line.end == size else size
                continue
            runs += is_header(line)
            if not runs and not is_blank(line):
                break
            ended = line.endswith(b"\n")
            if codec is None:
                end = size if ended else size - len(line)
    if not runs:
        raise TraceError(f"{path} is not a capture of this proxy, and is left as it is", _ELSEWHERE)
    if end < size:
        os.ftruncate(descriptor, end)
        say(f"{path} ended in a line that was cut off: its {size - end:,} bytes were taken away")
    if damaged := damaged - (size - end) if codec else 0:
        say(f"{path} is damaged: {damaged:,} of its bytes cannot be read, and stay as they are")
    return runs, end, ended if codec else True
