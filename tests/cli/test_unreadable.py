"""`kvaudit inspect --secrets` of what is no text: refused by name, with what to do."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvaudit.cli.unreadable import ReadableLines
from kvaudit.errors import TraceError
from kvaudit.traces.source import TraceSource


def tarred() -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("key"), io.BytesIO())
    return into.getvalue()


def parquet() -> bytes:
    into = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), into)
    return into.getvalue()


@pytest.mark.parametrize(
    ("content", "what", "remedy"),
    [
        (tarred(), "a tar archive", "unpack it first"),
        (gzip.compress(tarred(), mtime=0), "a tar archive", "unpack it first"),
        ("{}".encode("utf-16-le"), "text in UTF-16", "convert it to UTF-8 first (iconv -f UTF-16LE -t UTF-8)"),
        (b"SQLite format 3\x00", "a SQLite database", "take the text out of it first"),
        (parquet(), "a Parquet file", "import it with kvaudit record import --redact, and share the trace"),
    ],
)
def test_it_is_named_with_what_to_do(tmp_path: Path, content: bytes, what: str, remedy: str) -> None:
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(TraceError) as caught:
        list(ReadableLines(TraceSource("file", tmp_path / "file")))

    assert caught.value.message == f"file is {what}, and only lines of text in UTF-8 are looked at"
    assert str(caught.value.hint).startswith(remedy)
