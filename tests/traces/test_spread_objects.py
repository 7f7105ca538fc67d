"""One request in a file, printed over several lines."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from foreign_examples import EXAMPLES

from kvaudit.errors import TraceError
from kvaudit.traces import read_trace

ALONE = [(name, text) for name, text, _ in EXAMPLES if text.count("\n") == 0 and text.startswith("{")]


@pytest.mark.parametrize(("name", "text"), ALONE)
def test_an_object_is_the_same_over_several_lines(tmp_path: Path, name: str, text: str) -> None:
    plain, spread = tmp_path / "plain", tmp_path / "spread"
    plain.write_text(text)
    spread.write_bytes(b"\n" + orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2) + b"\n")

    assert read_trace(spread).digest == read_trace(plain).digest
    assert read_trace(spread, name).digest == read_trace(plain).digest


def test_there_are_such_requests() -> None:
    assert {"messages", "anthropic"} & {name for name, _ in ALONE}
    assert len(ALONE) > 5


@pytest.mark.parametrize("content", [b'{\n"messages": [}\n', b"{\n}\n{\n}\n", b"{\n"])
def test_what_is_no_object_is_still_an_error_with_its_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken").write_bytes(content)

    with pytest.raises(TraceError, match="line 1: broken JSON"):
        read_trace(tmp_path / "broken", "kvaudit")
    with pytest.raises(TraceError, match="broken JSON"):
        read_trace(tmp_path / "broken")
