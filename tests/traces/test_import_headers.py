"""What the headers of several traces say of how they were made is kept when they become one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvaudit.records import Request
from kvaudit.traces.importing import Imported, import_files
from kvaudit.traces.segments import make_segment
from kvaudit.traces.writer import write_trace

REDACTED = [{"detectors": ["key"], "values": 1}]


def trace(path: Path, **header: object) -> Path:
    write_trace(path, [Request(path.name, 0, (make_segment("query", path.name),))], header)
    return path


def told(imported: Imported) -> list[Any]:
    files: Any = imported.header()["imported"]
    return [file.get("header") for file in files]


def test_what_all_headers_say_alike_is_said_once(tmp_path: Path) -> None:
    made = {"segments": ["message"], "redacted": REDACTED}
    imported = import_files([trace(tmp_path / name, **made) for name in ("a", "b")])

    assert {name: imported.header()[name] for name in made} == made
    assert told(imported) == [None, None]
    assert imported.notes == []


@pytest.mark.parametrize("other", [{}, {"redacted": [{"detectors": ["email"], "values": 2}]}])
def test_what_they_do_not_say_alike_is_told_of_each_file(tmp_path: Path, other: dict[str, object]) -> None:
    first = trace(tmp_path / "a", segments=["message"], redacted=REDACTED)
    second = trace(tmp_path / "b", segments=["message"], **other)

    imported = import_files([first, second])

    assert imported.header()["segments"] == ["message"]
    assert "redacted" not in imported.header()
    assert told(imported) == [{"redacted": REDACTED}, other or None]
    assert imported.notes == ["the files differ in how they were made (redacted): the header tells it of each file"]


def test_files_without_requests_have_no_say(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("a", "b"):
        trace(tmp_path / "logs" / name, redacted=REDACTED)
    (tmp_path / "logs" / "README").write_text("Words.\n")

    imported = import_files([tmp_path / "logs"])

    assert imported.header()["redacted"] == REDACTED
    assert imported.notes == []


def test_where_each_trace_came_from_stays_with_it_and_is_nothing_to_note(tmp_path: Path) -> None:
    first = trace(tmp_path / "a", source=["x.log"], imported=[{"file": "x.log"}])
    second = trace(tmp_path / "b", source=["y.log"], imported=[{"file": "y.log"}])

    imported = import_files([first, second])

    assert imported.header()["source"] == ["a", "b"]
    assert told(imported) == [
        {"source": ["x.log"], "imported": [{"file": "x.log"}]},
        {"source": ["y.log"], "imported": [{"file": "y.log"}]},
    ]
    assert imported.notes == []


def test_the_header_of_a_trace_alone_stays_as_it_is(tmp_path: Path) -> None:
    imported = import_files([trace(tmp_path / "a", redacted=REDACTED, source=["x.log"])])

    assert {"redacted": REDACTED, "source": ["x.log"]}.items() <= imported.header().items()
    assert "imported" not in imported.header()
