"""Files as numbered lines: compression by content, and every failure as one error with file and line."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path

import pytest
import zstandard

from kvaudit.errors import TraceError
from kvaudit.traces import source as source_module
from kvaudit.traces.source import NotThisFormatError, open_source

LINES = b'{"a": 1}\n\n{"b": "x\xe2\x80\xa8y"}\n'
OBJECTS = [(1, {"a": 1}), (3, {"b": "x\u2028y"})]


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def objects(path: Path) -> list[tuple[int, dict[str, object]]]:
    with open_source(path) as source:
        return list(source.objects())


def refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        objects(path)
    return caught.value.message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        gzip.compress(LINES, mtime=0),
        zstd(LINES),
        gzip.compress(LINES[:9], mtime=0) + gzip.compress(LINES[9:], mtime=0),
        zstd(LINES[:9]) + zstd(LINES[9:]),
        b"\xef\xbb\xbf" + LINES,
        LINES.replace(b"\n", b"\r\n"),
        LINES.rstrip(b"\n"),
    ],
    ids=["plain", "gzip", "zstd", "two-gzip-members", "two-zstd-frames", "byte-order-mark", "crlf", "no-last-newline"],
)
def test_reads_lines_whatever_the_file_is_called(file: Path, content: bytes) -> None:
    file.write_bytes(content)

    assert objects(file) == OBJECTS


def test_reads_from_the_beginning_each_time(file: Path) -> None:
    file.write_bytes(gzip.compress(LINES))

    with open_source(file) as source:
        assert source.first_object() == {"a": 1}
        assert list(source.objects()) == list(source.objects()) == OBJECTS


def test_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(zstd(LINES))))

    with open_source(Path("-")) as source:
        assert source.name == "standard input"
        assert source.first_object() == {"a": 1}
        assert list(source.objects()) == OBJECTS


def test_reads_a_pipe_more_than_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, gzip.compress(LINES))
    os.close(writing)

    with open_source(Path(f"/dev/fd/{reading}")) as source:
        assert source.first_object() == {"a": 1}
        assert list(source.objects()) == OBJECTS
    os.close(reading)


def test_a_missing_file_is_named(file: Path) -> None:
    assert refusal(file) == f"{file}: there is no such file"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is a folder"


def test_an_impossible_name_is_refused(tmp_path: Path) -> None:
    assert "cannot be opened" in refusal(tmp_path / "a\0b")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(file: Path) -> None:
    file.write_bytes(LINES)
    file.chmod(0)

    assert refusal(file) == f"{file} cannot be opened: Permission denied"


def test_a_read_error_names_file_and_line(file: Path) -> None:
    file.symlink_to("/proc/self/mem")
    if not file.exists():
        pytest.skip("needs Linux's /proc")

    assert refusal(file).startswith(f"{file}, line 1: cannot be read: ")


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_truncated_compression_is_an_error(file: Path, compress: object, kept: float) -> None:
    whole = compress(b"".join(b'{"n": %d}\n' % n for n in range(5000)))  # type: ignore[operator]
    file.write_bytes(whole[: int(len(whole) * kept)])

    assert "cannot be read: " in refusal(file)
    assert f"{file}, line " in refusal(file)


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_damaged_checksum_is_an_error(file: Path, compress: object) -> None:
    whole = bytearray(compress(LINES))  # type: ignore[operator]
    whole[-5 if whole[0] == 0x1F else -1] ^= 0xFF
    file.write_bytes(whole)

    assert "cannot be read: " in refusal(file)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"a": 1', "broken JSON at character 8: "),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8"),
        (b'{"a": "\\ud800"}', "broken JSON at character "),
        (b'{"a": NaN}', "broken JSON at character "),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "broken JSON at character "),
        (b"[" * 100_000, "broken JSON at character "),
        (b"[1]", "not a JSON object but a list"),
        (b'"text"', "not a JSON object but a string"),
        (b"null", "not a JSON object but null"),
        (b"1.5", "not a JSON object but a number"),
        (b"true", "not a JSON object but true or false"),
    ],
)
def test_a_broken_line_is_named(file: Path, line: bytes, what: str) -> None:
    file.write_bytes(b'{"a": 1}\n' + line + b"\n")

    assert refusal(file).startswith(f"{file}, line 2: {what}")


def test_an_endless_line_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "LONGEST_LINE", 1 << 20)
    file.write_bytes(gzip.compress(b"{}\n" + b" " * (1 << 20) + b"x"))

    assert refusal(file) == f"{file}, line 2: longer than 1 MiB"


def test_the_first_object_is_refused_as_a_format_not_as_an_error(file: Path) -> None:
    file.write_bytes(b"\n<html>\n")

    with open_source(file) as source, pytest.raises(NotThisFormatError, match=r"^line 2: broken JSON"):
        source.first_object()
