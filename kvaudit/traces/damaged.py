"""Files of lines, parts of which are damaged: read on at the next gzip member or zstd frame that is whole."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from kvaudit.traces.decompress import CutShortError, Decompressed
from kvaudit.traces.source import LONGEST_LINE

_MAGIC = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd"}
_BLOCK = 1 << 16
_FIRST = 1 << 10
"""Bytes of a first piece: more than the longest header of gzip's with a file name, and the code tables behind it."""
_READS = 8


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
    start, search = 0, None if codec is None else _Search(stream, codec)
    while True:
        stream.seek(start)
        plain = None if codec is None else Decompressed(stream, codec)
        lines = stream if plain is None else io.BufferedReader(plain)
        try:
            while line := lines.readline(LONGEST_LINE + 1):
                yield line
        except OSError as error:
            if plain is None or search is None or error.errno is not None:
                raise
            damaged, cut = start + plain.whole, isinstance(error, CutShortError)
        else:
            return
        following = search.next_whole(damaged + 1)
        if following is None:
            yield Lost(damaged, stream.seek(0, io.SEEK_END), cut)
            return
        yield Lost(damaged, following, False)
        start = following


class _Search:
    """Looks for whole members or frames of a file, in time that is linear in its size whatever is in it.

    Each place that looks like a beginning costs a first piece. What goes on behind it is read as long as all these
    reads together are no more than _READS times the file: where garbage uses that up, what is behind it is lost.
    """

    def __init__(self, stream: BinaryIO, codec: str) -> None:
        self._stream, self._codec = stream, codec
        self._left = _READS * stream.seek(0, io.SEEK_END)

    def next_whole(self, start: int) -> int | None:
        """Where the next member or frame begins that is whole, from `start` on."""
        occurrences = _occurrences(self._stream, _MAGIC[self._codec], start)
        return next((position for position in occurrences if self._is_whole(position)), None)

    def _is_whole(self, position: int) -> bool:
        self._stream.seek(position)
        first = Decompressed(io.BytesIO(self._stream.read(_FIRST)), self._codec)
        try:
            first.readinto(bytearray(1))
        except CutShortError:
            if self._codec == "gzip":  # which has content in its first piece; zstd may have it a block later
                return first.whole > 0
        except OSError:
            return first.whole > 0
        return first.whole > 0 or self._is_whole_behind(position)

    def _is_whole_behind(self, position: int) -> bool:
        self._stream.seek(position)
        plain, buffer, end = Decompressed(self._stream, self._codec), bytearray(_BLOCK), position + self._left
        try:
            while not plain.whole and self._stream.tell() < end and plain.readinto(buffer):
                pass
        except OSError as error:
            if error.errno is not None:
                raise
        self._left -= min(self._left, self._stream.tell() - position)
        return plain.whole > 0


def _occurrences(stream: BinaryIO, pattern: bytes, start: int) -> Iterator[int]:
    while True:
        stream.seek(start)
        block = stream.read(_BLOCK)
        found = block.find(pattern)
        while found >= 0:
            yield start + found
            found = block.find(pattern, found + 1)
        if len(block) < _BLOCK:
            return
        start += len(block) - len(pattern) + 1
