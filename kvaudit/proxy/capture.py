"""The file of a recording: one exchange a line, each line a write and, when compressed, a frame of its own.

A process that is killed loses what it had not written. A line that was cut off is taken away when the file is opened
to go on.
"""

from __future__ import annotations

import gzip
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import orjson
from filelock import FileLock, Timeout

from kvaudit import __version__
from kvaudit.errors import KvauditError, TraceError
from kvaudit.traces.capture import HEADER, VERSION, is_header
from kvaudit.traces.decompress import CutShortError, Decompressed
from kvaudit.traces.source import LONGEST_LINE, is_blank

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_ZSTD_LEVEL = 3
_ELSEWHERE = "name another file with -o"


class RecordingError(KvauditError):
    """Something that passed through the proxy could not be written down."""

    exit_code = 3


class Capture:
    """An open capture. `run` counts how often the file was opened to record, from 1. Not safe for several threads."""

    def __init__(self, path: Path, descriptor: int, compress: Callable[[bytes], bytes], run: int, end: int) -> None:
        self.path, self.run = path, run
        self._descriptor, self._compress, self._end = descriptor, compress, end
        self._torn = False

    def append(self, line: bytes) -> None:
        """Write a line with its end. Raises OSError, and leaves the file ending in a whole line, where it cannot."""
        data = self._compress(line)
        if self._torn:
            self._mend()
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):  # a disk that is full takes a part first, then says so
                written += os.write(self._descriptor, data[written:])
        except OSError:
            self._torn = True
            with suppress(OSError):
                self._mend()
            raise
        self._end += len(data)

    def _mend(self) -> None:
        os.ftruncate(self._descriptor, self._end)
        self._torn = False


@contextmanager
def open_capture(path: Path, upstream: str, say: Callable[[str], None]) -> Iterator[Capture]:
    """A new capture, or one to go on with, held against every other proxy. `say` is told of what a cut end cost.

    Raises TraceError for a file that is no capture, is in use or cannot be written.
    """
    if not path.parent.is_dir():
        raise TraceError(f"cannot record to {path}: there is no folder {path.parent}", "make it first")
    if path.exists() and not path.is_file():
        raise TraceError(f"cannot record to {path}: it is no regular file", _ELSEWHERE)
    lock = FileLock(path.with_name(f".{path.name}.lock"), blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise TraceError(f"another proxy is recording to {path}", _ELSEWHERE) from error
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        yield from _opened(path, upstream, say)
    finally:
        lock.release()


def _opened(path: Path, upstream: str, say: Callable[[str], None]) -> Iterator[Capture]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        try:
            runs, end = _whole_part(path, descriptor)
            capture = Capture(path, descriptor, _compressor(path), runs + 1, end)
            if cut := os.fstat(descriptor).st_size - end:
                os.ftruncate(descriptor, end)
                say(f"{path} ended in a line that was cut off: its {cut:,} bytes were taken away")
            capture.append(_header(upstream))
        except OSError as error:
            raise _refusal(path, error) from error
        yield capture
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refusal(path: Path, error: OSError) -> TraceError:
    return TraceError(f"cannot record to {path}: {error.strerror or error}", _ELSEWHERE)


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


def _whole_part(path: Path, descriptor: int) -> tuple[int, int]:
    """How often the file was opened to record, and where its last whole line ends. Raises TraceError for others."""
    if not os.fstat(descriptor).st_size:
        return 0, 0
    runs = end = 0
    with path.open("rb") as file:
        codec = _CODECS.get(path.suffix)
        plain = None if codec is None else Decompressed(file, codec)
        lines = file if plain is None else io.BufferedReader(plain)
        with suppress(CutShortError):
            while line := lines.readline(LONGEST_LINE + 1):
                runs += is_header(line)
                if not runs and not is_blank(line):
                    break
                end += len(line) if line.endswith(b"\n") else 0
        if not runs:
            raise TraceError(f"{path} is not a capture of this proxy, and is left as it is", _ELSEWHERE)
        return runs, end if plain is None else plain.whole
