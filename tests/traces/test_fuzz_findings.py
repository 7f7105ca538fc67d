"""What fuzzing found (tests/fuzz), each with the smallest file that shows it."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvaudit.errors import TraceError
from kvaudit.traces import read_trace
from kvaudit.traces.source import open_source
from kvaudit.traces.tables import read_table


def parquet(table: pa.Table) -> bytes:
    with io.BytesIO() as stream:
        pq.write_table(table, stream, compression="none", use_dictionary=False)
        return stream.getvalue()


def refusals(path: Path) -> list[str]:
    """What is said of a file as a log and as an event table."""
    with pytest.raises(TraceError) as of_log:
        read_trace(path, "langsmith")
    with open_source(path) as source, pytest.raises(TraceError) as of_table:
        next(read_table(source).rows)
    return [str(of_log.value), str(of_table.value)]


NONE, BELOW_ZERO, MANY = b"\x00", b"\x03", b"\xfe\xff\xff\xff\xff\x3f"
"""Row counts as thrift has them: 0, -2, 2**40 - 1."""


@pytest.mark.parametrize("counts", [(NONE, NONE), (NONE, BELOW_ZERO), (MANY, MANY)])
def test_parquet_without_columns_is_refused_whatever_it_says_of_its_rows(
    tmp_path: Path, counts: tuple[bytes, bytes]
) -> None:
    """Below zero the library aborts the process; above, it gives out as many rows as the file says."""
    path = tmp_path / "runs.parquet"
    template = b"\x16%b\x19\x1c\x19\x0c\x16\x00\x16%b"  # rows of the file; one group: no columns, no bytes, its rows
    whole = parquet(pa.table({}))[:-8]
    assert template % (NONE, NONE) in whole
    changed = whole.replace(template % (NONE, NONE), template % counts)
    path.write_bytes(changed + (len(changed) - 4).to_bytes(4, "little") + b"PAR1")

    assert all(told.startswith(f"{path} has no columns") for told in refusals(path))


def test_what_is_said_of_damaged_parquet_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.parquet"
    whole = parquet(pa.table({"id": ["a", "b"]}))
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    path.write_bytes(whole[:footer] + b"\xff" * 8 + whole[footer + 8 :])

    for told in refusals(path):
        assert told.startswith(f"{path} cannot be read as Parquet: ")
        assert "\n" not in told
