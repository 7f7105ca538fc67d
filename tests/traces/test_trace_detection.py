"""Which format a trace has is told by its content."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvaudit import plugins
from kvaudit.errors import PluginError, TraceError, UsageError
from kvaudit.records import Trace
from kvaudit.traces import read_trace
from kvaudit.traces.source import NotThisFormatError, TraceSource

MESSAGES = '{"messages": [{"role": "user", "content": "Hello"}]}\n'
NATIVE = '{"request": "r1", "segments": [{"kind": "query", "text": "Hello"}]}\n'


def read_letters(source: TraceSource) -> Trace:
    """A format from outside: one letter a line."""
    number, line = next(source.lines())
    if not line.strip().isalpha():
        raise NotThisFormatError("the first line is no letter")
    raise source.error(number, "letters cannot be replayed")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("letters", f"{__name__}:read_letters", "kvaudit.traces")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "kvaudit.traces" else [])


@pytest.mark.parametrize(("content", "chat"), [(MESSAGES, True), (NATIVE, False), ("\n\n" + NATIVE, False)])
def test_the_content_tells_the_format(file: Path, content: str, chat: bool) -> None:
    file.write_text(content)

    assert read_trace(file).requests[0].chat is chat


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(file: Path, content: str) -> None:
    file.write_text(content)

    with pytest.raises(TraceError, match=rf"^{file} is empty "):
        read_trace(file)


def test_an_unknown_format_says_what_the_file_has(file: Path) -> None:
    file.write_text('{"colour": "x", "size": 1}\n')

    with pytest.raises(TraceError) as caught:
        read_trace(file)

    assert caught.value.message == (
        f"{file} is in no known trace format: the first line has the fields 'colour', 'size'"
    )
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("tried: kvaudit, capture, messages, openai-batch, ")


def test_a_reason_that_all_readers_share_is_said_once(file: Path) -> None:
    file.write_text("date,close\n")

    with pytest.raises(TraceError) as caught:
        read_trace(file)

    assert caught.value.message.count("line 1: broken JSON at character 1") == 1


def test_a_format_that_is_named_is_the_only_one_tried(file: Path) -> None:
    file.write_text(MESSAGES)

    assert read_trace(file, "messages").requests
    with pytest.raises(TraceError, match="is not a kvaudit trace: the first line has none of"):
        read_trace(file, "kvaudit")


def test_a_name_that_is_no_format_is_refused(file: Path) -> None:
    file.write_text(MESSAGES)

    with pytest.raises(UsageError, match=r"unknown trace format 'xml' \(known: kvaudit, capture, messages"):
        read_trace(file, "xml")


@pytest.mark.usefixtures("letters")
def test_formats_from_outside_are_tried_too(file: Path) -> None:
    file.write_text("a\n")
    with pytest.raises(TraceError, match=rf"^{file}, line 1: letters cannot be replayed"):
        read_trace(file)

    file.write_text("1\n")
    with pytest.raises(TraceError, match="letters: the first line is no letter"):
        read_trace(file)


def test_a_format_that_cannot_be_loaded_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_module:read", "kvaudit.traces")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point])
    file.write_text("1\n")

    with pytest.raises(PluginError, match="'broken'"):
        read_trace(file)
