"""Files of lines, parts of which are damaged: read on at the next gzip member or zstd frame that is whole."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from kvaudit.traces.decompress import CutShortError, Decompressed
from kvaudit.traces.source import LONGEST_LINE

_MAGIC = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd"}
_BLOCK = 1 << 16


class Lost(NamedTuple):
    """Bytes [start, end) of a file, which cannot be read. `cut`: what stands there is the beginning of something."""

    start: int
    end: int
    cut: bool


def codec_of(stream: BinaryIO) -> str | None:
    """What a file is compressed with, told by its first bytes."""
    stream.seek(0)
    head = stream.read(4)
    return next((codec for codec, magic in _MAGIC.items() if head.startswith(magic)), None)


def readable_lines(stream: BinaryIO, codec: str | None) -> Iterator[bytes | Lost]:
    """The lines of a file, with their ends, and where compressed data is damaged or cut off, what is lost.

    What is longer than LONGEST_LINE comes in pieces. Raises OSError where the file cannot be read.
    """
    start = 0
    while True:
        stream.seek(start)
        plain = None if codec is None else Decompressed(stream, codec)
        lines = stream if plain is None else io.BufferedReader(plain)
        try:
            while line := lines.readline(LONGEST_LINE + 1):
                yield line
        except OSError as error:
            if plain is None or codec is None or error.errno is not None:
                raise
            damaged, cut = start + plain.whole, isinstance(error, CutShortError)
        else:
            return
        following = _next_whole(stream, codec, damaged + 1)
        if following is None:
            yield Lost(damaged, stream.seek(0, io.SEEK_END), cut)
            return
        yield Lost(damaged, following, False)
        start = following


def _next_whole(stream: BinaryIO, codec: str, start: int) -> int | None:
    """Where the next member or frame begins that is whole."""
    occurrences = _occurrences(stream, _MAGIC[codec], start)
    return next((position for position in occurrences if _is_whole(stream, codec, position)), None)


def _occurrences(stream: BinaryIO, pattern: bytes, start: int) -> Iterator[int]:
    while True:
        stream.seek(start)
        block = stream.read(_BLOCK)
        found = block.find(pattern)
        if found >= 0:
            yield start + found
            start += found + 1
        elif len(block) < _BLOCK:
            return
        else:
            start += len(block) - len(pattern) + 1


def _is_whole(stream: BinaryIO, codec: str, position: int) -> bool:
    stream.seek(position)
    plain = Decompressed(stream, codec)
    buffer = bytearray(_BLOCK)
    try:
        while not plain.whole and plain.readinto(buffer):
            pass
    except OSError as error:
        if error.errno is not None:
            raise
    return plain.whole > 0
