"""Archives, other compression and other encodings are named, with what to do about them."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvaudit.errors import TraceError
from kvaudit.traces import read_trace

CHAT = b'{"messages": [{"role": "user", "content": "Hi"}]}\n'
TEXT = CHAT.decode()


def zipped() -> bytes:
    into = io.BytesIO()
    with zipfile.ZipFile(into, "w") as archive:
        archive.writestr("log.jsonl", CHAT)
    return into.getvalue()


def tarred() -> bytes:
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w") as archive:
        member = tarfile.TarInfo("log.jsonl")
        member.size = 2 * len(CHAT)
        archive.addfile(member, io.BytesIO(CHAT * 2))
    return into.getvalue()


PACKED: list[tuple[str, Callable[[], bytes]]] = [
    ("a zip archive: unpack it first", zipped),
    ("a tar archive: unpack it first", tarred),
    ("a tar archive: unpack it first", lambda: gzip.compress(tarred())),
    ("compressed with bzip2: unpack it first", lambda: bz2.compress(CHAT)),
    ("compressed with xz: unpack it first", lambda: lzma.compress(CHAT)),
    ("compressed with gzip twice: unpack it first", lambda: gzip.compress(gzip.compress(CHAT))),
    ("a 7z archive: unpack it first", lambda: b"7z\xbc\xaf\x27\x1c\0\4" + bytes(40)),
    *(
        (f"text in {form}: convert it to UTF-8 first (iconv -f {form}{order} -t UTF-8)", content)
        for form in ("UTF-16", "UTF-32")
        for order in ("LE", "BE")
        for content in (
            lambda form=form, order=order: TEXT.encode(f"{form}-{order}"),
            lambda form=form, order=order: f"\ufeff{TEXT}".encode(f"{form}-{order}"),
            lambda form=form, order=order: f"[{TEXT}]".encode(f"{form}-{order}"),
        )
    ),
]


@pytest.mark.parametrize(("what", "content"), PACKED)
@pytest.mark.parametrize("name", [None, "messages"])
def test_it_says_what_a_file_is_and_what_to_do(
    tmp_path: Path, what: str, content: Callable[[], bytes], name: str | None
) -> None:
    (tmp_path / "log").write_bytes(content())

    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "log", name)

    assert caught.value.message == f"{tmp_path / 'log'} is {what}"


def test_words_that_begin_like_a_bzip2_file_are_words(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"BZhang said:\n" + CHAT * 2)

    assert len(read_trace(tmp_path / "log").requests) == 2


def test_a_format_from_outside_may_read_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvaudit import plugins
    from kvaudit.records import Trace
    from kvaudit.traces import TraceSource, read_as

    def read_zip(source: TraceSource) -> Trace:
        return Trace((), "digest", source.name, {})

    load = plugins.load
    monkeypatch.setattr(plugins, "available", lambda family: {**plugins.BUILT_IN["traces"], "zip": None})
    monkeypatch.setattr(plugins, "load", lambda family, name: read_zip if name == "zip" else load(family, name))
    (tmp_path / "log").write_bytes(zipped())

    assert read_as(TraceSource("log", tmp_path / "log"))[0] == "zip"
    assert read_as(TraceSource("log", tmp_path / "log"), "zip")[0] == "zip"
