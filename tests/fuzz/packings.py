"""How the content of a trace is packed into a file: compressed, line by line, damaged, cut off, as a table."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from json_mutations import parsed_lines


def packed_as_parquet(content: bytes) -> bytes:
    """The JSON objects of a file as rows, what they hold as JSON text; the content itself where there are none."""
    values = parsed_lines(content)
    values = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    try:
        rows = [{name: as_cell(below) for name, below in value.items()} for value in values if isinstance(value, dict)]
        with io.BytesIO() as stream:
            pq.write_table(pa.Table.from_pylist(rows), stream)
            return stream.getvalue() if rows else content
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return content


def as_cell(value: object) -> object:
    return orjson.dumps(value).decode() if isinstance(value, dict | list) else value


def line_by_line(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Each line as a member of its own, the middle of the file damaged, as a capture may be."""

    def packed(content: bytes) -> bytes:
        whole = bytearray(b"".join(map(compress, content.splitlines(keepends=True))))
        for at in range(len(whole) // 2, min(len(whole), len(whole) // 2 + 3)):
            whole[at] ^= 0x55
        return bytes(whole)

    return packed


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def cut(packed: bytes) -> bytes:
    return packed[: len(packed) * 2 // 3]


PACKINGS: tuple[Callable[[bytes], bytes], ...] = (
    bytes,
    gzip.compress,
    zstd,
    line_by_line(gzip.compress),
    line_by_line(zstd),
    lambda content: cut(gzip.compress(content)),
    lambda content: cut(line_by_line(zstd)(content)),
    packed_as_parquet,
)
