"""Files in which nothing could be found because they are no text that is looked at: refused, never called clean."""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.errors import TraceError
from kvaudit.traces.packing import HEAD_BYTES, Packing, packing_of
from kvaudit.traces.source import TraceSource, is_blank

_PARQUET = b"PAR1"
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
        self._refuse_packed()
        for number, line in self._source.lines():
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

    def _refuse_packed(self) -> None:
        head = self._source.head(HEAD_BYTES)
        packing = packing_of(head)
        if head.startswith(_PARQUET):
            packing = Packing(
                "a Parquet file", "import it with kvaudit record import --redact, and share the trace that it writes"
            )
        if packing:
            raise TraceError(
                f"{self._source.name} is {packing.what}, and only lines of text in UTF-8 are looked at", packing.remedy
            )


def _is_utf8(line: bytes) -> bool:
    if line.isascii():
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
