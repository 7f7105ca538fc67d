"""Ids of requests over several files: those that count places begin anew in each."""

from __future__ import annotations

from pathlib import Path

import orjson

from kvaudit.traces.importing import Imported, import_files
from kvaudit.traces.writer import write_trace


def capture(path: Path, *exchanges: tuple[str, str, float | None]) -> Path:
    """(id, text, time) of each exchange."""
    lines: list[dict[str, object]] = [{"kvaudit_capture": 1, "upstream": "http://x"}]
    for name, text, time in exchanges:
        body = {"messages": [{"role": "user", "content": text}]}
        lines.append({"exchange": name, "api": "chat", "started": time, "outcome": "complete", "request": body})
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def chats(path: Path, *records: dict[str, object]) -> Path:
    lines = ({"messages": [{"role": "user", "content": "Hi"}], **record} for record in records)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def ids(imported: Imported) -> list[str]:
    return [request.request_id for request in imported.requests]


def left_out(imported: Imported) -> list[int]:
    return [sum(row["count"] for row in file.left_out) for file in imported.files]


def test_the_same_prompt_in_two_captures_is_two_requests(tmp_path: Path) -> None:
    first = capture(tmp_path / "a", ("r1-1", "Hi", 1.0), ("r1-2", "And?", 2.0))
    second = capture(tmp_path / "b", ("r1-1", "Hi", 5.0), ("r1-2", "And?", None))

    imported = import_files([first, second])

    assert ids(imported) == ["a:r1-1", "a:r1-2", "b:r1-1", "b:r1-2"]
    assert left_out(imported) == [0, 0]


def test_ids_of_a_capture_alone_stay(tmp_path: Path) -> None:
    assert ids(import_files([capture(tmp_path / "a", ("r1-1", "Hi", 1.0))])) == ["r1-1"]


def test_the_same_exchange_in_two_files_is_one(tmp_path: Path) -> None:
    exchanges = ("r1-1", "Hi", 1.25), ("r1-2", "And?", 2.5)
    first, second = capture(tmp_path / "a", *exchanges), capture(tmp_path / "b", *exchanges, ("r2-1", "New", 3.0))

    imported = import_files([first, second])

    assert ids(imported) == ["a:r1-1", "a:r1-2", "b:r2-1"]
    assert imported.files[1].left_out[0]["places"] == ["line 2 (r1-1)", "line 3 (r1-2)"]


def test_exchanges_without_a_time_are_never_taken_for_one(tmp_path: Path) -> None:
    paths = [capture(tmp_path / name, ("r1-1", "Hi", None)) for name in "ab"]

    assert ids(import_files(paths)) == ["a:r1-1", "b:r1-1"]


def test_lines_are_places_too(tmp_path: Path) -> None:
    first, second = chats(tmp_path / "a", {"timestamp": 1}, {}), chats(tmp_path / "b", {"timestamp": 1}, {})

    imported = import_files([first, second])

    assert ids(imported) == ["a:line-1", "a:line-2", "b:line-2"]
    assert left_out(imported) == [0, 1]


def test_an_id_of_a_log_and_its_prompt_are_enough_whatever_the_times(tmp_path: Path) -> None:
    first, second = chats(tmp_path / "a", {"id": "x", "timestamp": 1}), chats(tmp_path / "b", {"id": "x"})

    assert ids(import_files([first, second])) == ["x"]


def test_places_that_an_import_named_stay_places(tmp_path: Path) -> None:
    """Two captures of one name, each imported alone with another, then both traces together."""
    traces = []
    for folder, time in (("one", 1.0), ("two", 2.0)):
        imported = import_files(
            [
                capture(tmp_path / folder / "log", ("r1-1", "Hi", time)),
                capture(tmp_path / folder / "other", ("r1-1", "And?", None)),
            ]
        )
        traces.append(tmp_path / f"{folder}.jsonl")
        write_trace(traces[-1], imported.requests, imported.header())

    imported = import_files(traces)

    assert ids(imported) == ["log:r1-1", "other:r1-1", "two.jsonl:log:r1-1", "two.jsonl:other:r1-1"]
    assert left_out(imported) == [0, 0]
    assert ids(import_files([traces[0], traces[0]])) == ["log:r1-1", "other:r1-1", "one.jsonl:other:r1-1"]
