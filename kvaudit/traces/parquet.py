"""Parquet files of others, opened with care: damage is told in one line, and what pyarrow would abort on is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvaudit.errors import TraceError
from kvaudit.traces.source import TraceSource

if TYPE_CHECKING:
    from pyarrow import parquet

_MAGIC = b"PAR1"


def is_parquet(source: TraceSource) -> bool:
    with source.path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def open_parquet(source: TraceSource) -> parquet.ParquetFile:
    """Raises TraceError for a file that cannot be read. What is read of it later raises within `damage_told` alone."""
    from pyarrow import parquet

    with damage_told(source):
        file = parquet.ParquetFile(source.path)
    if not file.metadata.num_columns:  # pyarrow takes any number of rows for true then, and aborts below zero
        raise TraceError(f"{source.name} has no columns")
    return file


@contextmanager
def damage_told(source: TraceSource) -> Iterator[None]:
    """Raises TraceError in the place of what pyarrow raises for data that it cannot read, or text that is not UTF-8."""
    import pyarrow as pa

    try:
        yield
    except (OSError, OverflowError, ValueError, NotImplementedError, pa.ArrowException) as error:
        told = " ".join(str(error).split())  # pyarrow passes on messages of several lines
        raise TraceError(f"{source.name} cannot be read as Parquet: {told}") from error
