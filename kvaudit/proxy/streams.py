"""Copies of bodies on their way: content encodings undone, server-sent events split."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

_STEP = 1 << 12
"""Bytes decoded at a time: few, because a compressed byte may stand for thousands."""


class UnknownEncodingError(Exception):
    """A content encoding that no library here undoes."""


class TooLargeError(Exception):
    """A body that decodes to more bytes than are kept."""


class BodyDecoder:
    """Undoes a Content-Encoding chunk by chunk. Raises UnknownEncodingError when made for one that it does not know."""

    def __init__(self, encoding: str, limit: int) -> None:
        """`limit` is the largest size of the decoded body in bytes."""
        self._decode = _decoder(encoding.strip().lower())
        self._left = limit

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The chunk decoded, in pieces. Raises TooLargeError behind the limit, the library's error for damaged data."""
        if self._decode is None:
            yield self._counted(data)
            return
        for start in range(0, len(data), _STEP):
            yield self._counted(self._decode(data[start : start + _STEP]))

    def whole(self, data: bytes) -> bytes:
        return b"".join(self.feed(data))

    def _counted(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise TooLargeError
        return data


def _decoder(encoding: str) -> Callable[[bytes], bytes] | None:
    """None where there is nothing to undo."""
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip"):
        return _Members(lambda: zlib.decompressobj(31))
    if encoding == "deflate":
        return _Deflate()
    if encoding == "zstd":
        from zstandard import ZstdDecompressor

        return _Members(lambda: ZstdDecompressor().decompressobj())
    if encoding == "br":
        return _brotli()
    raise UnknownEncodingError(encoding)


class _Members:
    """One gzip member or zstd frame after the other; zeros behind one are padding."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._decoder: Any = None

    def __call__(self, data: bytes) -> bytes:
        decoded = []
        while data := data if self._decoder else data.lstrip(b"\0"):
            self._decoder = self._decoder or self._make()
            decoded.append(self._decoder.decompress(data))
            data = b""
            if self._decoder.eof:
                data, self._decoder = self._decoder.unused_data, None
        return b"".join(decoded)


class _Deflate:
    """Deflate in a zlib wrapping, or raw, as some servers send it."""

    def __init__(self) -> None:
        self._head = b""
        self._decode: Callable[[bytes], bytes] | None = None

    def __call__(self, data: bytes) -> bytes:
        if self._decode is None:
            data = self._head = self._head + data
            if len(data) < 2:
                return b""
            wrapped = data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0  # RFC 1950, section 2.2
            self._decode = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS).decompress
        return self._decode(data)


def _brotli() -> Callable[[bytes], bytes]:
    for name in ("brotli", "brotlicffi"):
        try:
            decompressor = import_module(name).Decompressor()
        except ImportError:
            continue
        decode: Callable[[bytes], bytes] = getattr(decompressor, "process", None) or decompressor.decompress
        return decode
    raise UnknownEncodingError("br")


class ServerSentEvents:
    """Splits chunks, cut anywhere, into the data of events; `name` is that of the latest event.

    Comments and other fields are passed over.
    """

    def __init__(self) -> None:
        self.name = b""
        self._next_name = b""
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._after_return = False
        self._first = True

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        if not chunk:
            return
        if b"\r" in chunk or self._after_return:
            chunk = self._with_line_feeds(chunk)
        first, *rest = chunk.split(b"\n")
        self._line.append(first)
        for following in rest:
            if (data := self._end_of_line()) is not None:
                yield data
            self._line.append(following)

    def finish(self) -> Iterator[bytes]:
        """An event that the end of the stream left without its blank line."""
        for _ in range(2):
            if (data := self._end_of_line()) is not None:
                yield data

    def _with_line_feeds(self, chunk: bytes) -> bytes:
        if self._after_return:
            chunk = chunk.removeprefix(b"\n")
        self._after_return = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _end_of_line(self) -> bytes | None:
        """The event's data where the line that ends here is blank."""
        line = b"".join(self._line)
        self._line.clear()
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            self.name, self._next_name = self._next_name, b""
            return self._dispatched()
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            self._next_name = line[6:].removeprefix(b" ")
        return None

    def _dispatched(self) -> bytes | None:
        if not self._data:
            return None
        data = b"\n".join(self._data)
        self._data.clear()
        return data
