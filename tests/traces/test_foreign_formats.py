"""Every format of other tools: its examples become what they say, and no other format takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_examples import EXAMPLES, MODULES, shown

from kvaudit.plugins import BUILT_IN, load
from kvaudit.traces import read_as, read_trace
from kvaudit.traces.hash_only import MOONCAKE, WEKA, HashesOnlyError
from kvaudit.traces.source import NotThisFormatError, open_source

HASHES = [("mooncake", MOONCAKE), ("weka", WEKA)]
NATIVE = ("kvaudit", '{"request": "r1", "segments": [{"kind": "query", "text": "Hello"}]}\n')
FILES = [NATIVE, *((name, text) for name, text, _ in EXAMPLES), *HASHES]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.mark.parametrize(("name", "text", "becomes"), EXAMPLES)
def test_an_example_becomes_what_it_says(file: Path, name: str, text: str, becomes: dict[str, list[str]]) -> None:
    file.write_text(text)

    with open_source(file) as source:
        told, trace = read_as(source)

    assert told == name
    assert shown(trace) == becomes
    assert list(shown(trace)) == list(becomes)
    assert [request.ordinal for request in trace.requests] == list(range(len(becomes)))


def test_every_format_has_examples() -> None:
    assert {name for name, *_ in EXAMPLES} == MODULES.keys() - {"kvaudit", "mooncake", "weka"}


@pytest.mark.parametrize("reader", BUILT_IN["traces"])
@pytest.mark.parametrize(("name", "text"), FILES)
def test_a_file_is_read_only_by_its_own_format(file: Path, name: str, text: str, reader: str) -> None:
    file.write_text(text)

    with open_source(file) as source:
        if reader == name:
            try:
                assert load("traces", reader)(source).requests
            except HashesOnlyError:
                assert (name, text) in HASHES
        else:
            with pytest.raises(NotThisFormatError):
                load("traces", reader)(source)


@pytest.mark.parametrize(("name", "text"), HASHES)
def test_hashes_without_prompts_are_refused_with_the_reason(file: Path, name: str, text: str) -> None:
    file.write_text(text)

    with pytest.raises(
        HashesOnlyError, match=rf"(?i){file} is a {name} trace.*without the prompts.*no answer"
    ) as caught:
        read_trace(file)

    assert caught.value.exit_code == 2


@pytest.mark.parametrize(("name", "text", "becomes"), EXAMPLES)
def test_line_ends_and_a_byte_order_mark_change_nothing(
    file: Path, name: str, text: str, becomes: dict[str, list[str]]
) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode() + b"\r\n")

    assert shown(read_trace(file)) == becomes


@pytest.mark.parametrize(("name", "text", "becomes"), EXAMPLES)
def test_lines_end_at_line_feeds_only(file: Path, name: str, text: str, becomes: dict[str, list[str]]) -> None:
    odd = "Hi\u2028\u2029\u0085there"
    file.write_text(text.replace("Hi", odd).replace("Mend it.", odd).replace("Once upon", odd), newline="\n")

    assert any(odd in message for messages in shown(read_trace(file)).values() for message in messages) == any(
        word in text for word in ("Hi", "Mend it.", "Once upon")
    )
