"""Files in which nothing could be found because they are no text that is looked at: refused, never called clean."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.errors import TraceError
from kvaudit.traces.source import TraceSource, is_blank

_UNPACK = "unpack it, and look at what is in it"
_CONVERT = "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"
_IMPORT = "import it with kvaudit record import --redact, and share the trace that it writes"
_CONTENT = "only text in UTF-8 is looked at: take the text out of it"
_KINDS = (
    (b"PAR1", "a Parquet file", _IMPORT),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"PK\x05\x06", "a zip archive", _UNPACK),
    (b"BZh", "compressed with bzip2", _UNPACK),
    (b"\x1f\x8b", "compressed with gzip twice", _UNPACK),
    (b"\x1f\x9d", "compressed with compress", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd twice", _UNPACK),
    (b"\xfd7zXZ\x00", "compressed with xz", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", _UNPACK),
    (b"LZIP\x01", "compressed with lzip", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", _UNPACK),
    (b"ARROW1", "an Arrow file", _CONTENT),
    (b"Obj\x01", "an Avro file", _CONTENT),
    (b"ORC", "an ORC file", _CONTENT),
    (b"%PDF-", "a PDF file", _CONTENT),
    (b"SQLite format 3\x00", "a SQLite database", _CONTENT),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"),
    (b"\xff\xfe", "text in UTF-16", _CONVERT),
    (b"\xfe\xff", "text in UTF-16", _CONVERT),
)
_FIRST_BYTES = 1 << 16


class ReadableLines:
    """The lines of a source that hold text. `not_utf8` counts those that do in part only."""

    def __init__(self, source: TraceSource) -> None:
        self._source = source
        self.not_utf8 = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """(line number, line). Raises TraceError for archives, for what is compressed otherwise or twice, for NULs in
        the first bytes and, in the end, for a file of which half the lines or more are not UTF-8.
        """
        seen = lines = 0
        for number, line in self._source.lines():
            if not seen:
                self._refuse_known(line)
            if seen < _FIRST_BYTES and b"\0" in line[: _FIRST_BYTES - seen]:
                raise TraceError(
                    f"{self._source.name} is no text in UTF-8: there are NULs in it",
                    "unpack it if it is an archive, convert it to UTF-8 if it is text (iconv)",
                )
            seen += len(line)
            if is_blank(line):
                continue
            lines += 1
            self.not_utf8 += not _is_utf8(line)
            yield number, line
        if self.not_utf8 and 2 * self.not_utf8 >= lines:
            raise TraceError(
                f"{self._source.name} is no text in UTF-8: {self.not_utf8:,} of {lines:,} lines are not",
                "unpack it if it is an archive, convert it to UTF-8 if it is text (iconv)",
            )

    def _refuse_known(self, first: bytes) -> None:
        for magic, what, hint in _KINDS:
            if first.startswith(magic) and not (magic == b"BZh" and not first[3:4].isdigit()):
                raise TraceError(f"{self._source.name} is {what}, and only lines of text in UTF-8 are looked at", hint)


def _is_utf8(line: bytes) -> bool:
    if line.isascii():
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
