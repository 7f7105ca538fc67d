"""Gzip and zstd as plain bytes: every byte before a cut or damaged end is given out before the end is told."""

from __future__ import annotations

import io
import zlib
from typing import Any, BinaryIO

_STEP = 1 << 12
"""Bytes read at a time: few, because a compressed byte may stand for thousands."""

_GZIP_CONTAINER = 31


class CutShortError(OSError):
    """The file ends inside a gzip member or zstd frame: its writer was killed, or a copy of it is not whole."""


class Decompressed(io.RawIOBase):
    """The content of one gzip member or zstd frame after the other.

    Reading raises CutShortError at an unfinished end, OSError at bytes that are not compressed data. `whole` is how
    many bytes of the file are finished members or frames, up to where it has been read.
    """

    def __init__(self, stream: BinaryIO, codec: str) -> None:
        self._stream, self._codec = stream, codec
        self._decoder: Any = None
        self._pending = memoryview(b"")
        self._unread = b""
        self._taken = 0
        self.whole = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            if not self._unread:
                self._unread = self._stream.read(_STEP)
            if not self._unread:
                if self._decoder is not None:
                    raise CutShortError("it ends in the middle of compressed data")
                return 0
            self._decode()
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _decode(self) -> None:
        decoder = self._decoder = self._decoder or _decoder(self._codec)
        try:
            self._pending = memoryview(decoder.decompress(self._unread))
        except Exception as error:  # zlib.error or ZstdError
            raise OSError(f"its {self._codec} data is damaged") from error
        left = decoder.unused_data if decoder.eof else b""
        self._taken += len(self._unread) - len(left)
        self._unread = left
        if decoder.eof:
            self._decoder, self.whole = None, self._taken
            if self._codec == "gzip":
                self._unread = left.lstrip(b"\0")  # padding, which gzip allows behind a member
                self._taken += len(left) - len(self._unread)


def _decoder(codec: str) -> Any:
    if codec == "gzip":
        return zlib.decompressobj(_GZIP_CONTAINER)
    from zstandard import ZstdDecompressor

    return ZstdDecompressor().decompressobj()
