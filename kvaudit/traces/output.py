"""A file that is whole or not there: written beside its place, flushed, renamed. Compressed by its suffix."""

from __future__ import annotations

import fcntl
import gzip
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvaudit.errors import TraceError

_ZSTD_LEVEL = 10


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream for the new content of `path`, which is replaced when the block ends and untouched when it raises.

    `.gz` and `.zst` compress, with nothing in the bytes but the content. Raises TraceError where `path` cannot be
    written or is no regular file.
    """
    target = _target(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _remove_stale(target)
        with _locked(beside) as file:
            try:
                with _compressed(file, target.suffix) as stream:
                    yield stream
                file.flush()
                os.fsync(file.fileno())
                beside.replace(target)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror or error}") from error


def _remove_stale(target: Path) -> None:
    """Remove what killed processes left beside `target`: a file there that no process holds locked."""
    named = re.compile(rf"\.{re.escape(target.name)}\.[0-9]+\.tmp")
    with suppress(OSError):
        for beside in target.parent.iterdir():
            if named.fullmatch(beside.name) and beside.is_file():
                with suppress(OSError), beside.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    beside.unlink()


def _locked(path: Path) -> IO[bytes]:
    """A new file, locked until it is closed. One that was removed as stale before it was locked is made again."""
    while True:
        file = path.open("xb")
        with suppress(OSError):  # a file system without locks, on which nothing is removed either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _target(path: Path) -> Path:
    """The file that is written: where `path` is a link, the file that it points to."""
    try:
        target = path.resolve()
        if target.is_dir():
            raise TraceError(f"{path} is a folder", "name a file to write")
        if target.exists() and not target.is_file():
            raise TraceError(f"{path} is no regular file", "name a file to write")
        if not target.parent.is_dir():
            raise TraceError(f"{path} cannot be written: there is no folder {target.parent}", "make it first")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise TraceError(f"{path} cannot be written: {reason or error}") from error
    return target


@contextmanager
def _compressed(file: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    if suffix == ".gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as stream:
            yield stream  # type: ignore[misc]
    elif suffix == ".zst":
        from zstandard import ZstdCompressor

        compressor = ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        with compressor.stream_writer(file, closefd=False) as stream:
            yield stream
    else:
        yield file
