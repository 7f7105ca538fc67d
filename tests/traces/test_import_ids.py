"""Ids of requests over several files: those that count places begin anew in each."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

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
    first, second = chats(tmp_path / "a", {"timestamp": 1.5}, {}), chats(tmp_path / "b", {"timestamp": 1.5}, {})

    imported = import_files([first, second])

    assert ids(imported) == ["a:line-1", "a:line-2", "b:line-2"]
    assert left_out(imported) == [0, 1]


def test_an_id_of_a_log_and_its_prompt_are_enough_whatever_the_times(tmp_path: Path) -> None:
    first, second = chats(tmp_path / "a", {"id": "x", "timestamp": 1}), chats(tmp_path / "b", {"id": "x"})

    assert ids(import_files([first, second])) == ["x"]


def test_places_that_an_import_named_stay_places(tmp_path: Path) -> None:
    """Two captures of one name, each imported alone with another, then both traces together."""
    traces = []
    for folder, time in (("one", 1.5), ("two", 2.5)):
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
    assert ids(import_files([traces[0], traces[0]])) == ["log:r1-1", "other:r1-1"]


def test_the_same_line_at_the_same_whole_second_is_two_requests(tmp_path: Path) -> None:
    paths = [chats(tmp_path / name, {"timestamp": 1700000000}) for name in "ab"]

    assert ids(import_files(paths)) == ["a:line-1", "b:line-1"]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ({}, {}, 1),
        ({"timestamp": 1}, {"timestamp": 1}, 1),
        ({"timestamp": 1}, {"timestamp": 2}, 2),
        ({"timestamp": 1}, {}, 1),
        ({}, {"timestamp": 1}, 1),
        ({"session": "alice"}, {"session": "bob"}, 2),
        ({"session": "alice"}, {"session": "alice"}, 1),
        ({"session": "alice"}, {}, 1),
        ({"session": "alice", "timestamp": 1}, {"timestamp": 1}, 1),
        ({"session": "alice", "timestamp": 1}, {"session": "alice", "timestamp": 2}, 2),
        ({}, {"messages": [{"role": "user", "content": "And?"}]}, 2),
    ],
)
def test_an_id_names_one_request_unless_prompt_time_or_session_differ(
    tmp_path: Path, first: dict[str, object], second: dict[str, object], count: int
) -> None:
    """In one file and over two."""
    one, two = {"id": "x", **first}, {"id": "x", **second}
    together = chats(tmp_path / "log", one, two)
    apart = [chats(tmp_path / "a", one), chats(tmp_path / "b", two)]

    assert ids(import_files([together])) == ["x", "x#2"][:count]
    assert ids(import_files(apart)) == ["x", "b:x"][:count]
    assert left_out(import_files([together])) == [2 - count]
    assert sum(left_out(import_files(apart))) == 2 - count


def test_ids_of_their_own_are_counted_and_never_those_of_others(tmp_path: Path) -> None:
    log = chats(tmp_path / "log", *({"id": name, "timestamp": at} for at, name in enumerate(["x#2", "x", "x", "x"])))

    imported = import_files([log])

    assert ids(imported) == ["x#2", "x", "x#3", "x#4"]
    assert imported.files[0].notes == [
        "2 requests have ids that came before with another prompt, time or session: kept as ID#2 and so on"
    ]


def test_captures_one_behind_the_other_in_a_file_keep_all_exchanges(tmp_path: Path) -> None:
    parts = [
        capture(tmp_path / "one", ("r1-1", "Hi", 1.5), ("r1-2", "And?", 2.5)),
        capture(tmp_path / "two", ("r1-1", "Hi", 3.5), ("r1-2", "Why?", 4.5)),
    ]
    together = tmp_path / "together"
    together.write_bytes(b"".join(part.read_bytes() for part in parts))

    assert ids(import_files([together])) == ["r1-1", "r1-2", "r1-1#2", "r1-2#2"]
    assert len(import_files([together, parts[0]]).requests) == 4


def test_a_trace_of_two_logs_and_one_of_these_count_once(tmp_path: Path) -> None:
    logs = [
        capture(tmp_path / "a", ("r1-1", "Hi", 1.5)),
        capture(tmp_path / "b", ("r1-1", "Hi", 2.5), ("r1-2", "And?", 3.5)),
        chats(tmp_path / "c", {"id": "x", "timestamp": 4}),
        chats(tmp_path / "d", {"id": "x", "timestamp": 5}),
    ]
    imported = import_files(logs)
    write_trace(trace := tmp_path / "trace.jsonl", imported.requests, imported.header())

    assert ids(imported) == ["a:r1-1", "b:r1-1", "b:r1-2", "x", "d:x"]
    for log in logs:
        assert ids(import_files([trace, log])) == ids(imported)


def test_an_id_with_a_colon_is_no_id_behind_the_name_of_a_file(tmp_path: Path) -> None:
    write_trace(trace := tmp_path / "trace.jsonl", import_files([chats(tmp_path / "a", {"id": "k:x"})]).requests)

    assert ids(import_files([trace, chats(tmp_path / "b", {"id": "x"})])) == ["k:x", "x"]


def test_a_file_by_two_paths_is_read_once(tmp_path: Path) -> None:
    log = chats(tmp_path / "log", {})
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(log)
    hard.hardlink_to(log)

    imported = import_files([log, link, hard, log])

    assert ids(imported) == ["line-1"]
    assert imported.notes == [
        f"{link} is the same file as {log}: it is read once",
        f"{hard} is the same file as {log}: it is read once",
        f"{log} is named more than once: it is read once",
    ]


def batch(folder: Path, text: str, *failing: str) -> list[Path]:
    """The input and the results of a batch with the ids 0 to 2."""
    folder.mkdir(exist_ok=True)
    names = [str(number) for number in range(3)]
    body = {"messages": [{"role": "user", "content": text}]}
    inputs = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name in names]
    results = [{"custom_id": name, "response": {"status_code": 500 if name in failing else 200}} for name in names]
    paths = [folder / "input.jsonl", folder / "output.jsonl"]
    for path, lines in zip(paths, (inputs, results), strict=True):
        path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return paths


def test_results_are_those_of_the_batch_beside_them(tmp_path: Path) -> None:
    first, second = batch(tmp_path / "one", "Hi", "1"), batch(tmp_path / "two", "And?")

    for paths in ([*first, *second], [*second, *first], [tmp_path]):
        imported = import_files(paths)
        counts = {Path(file.name).parent.name: len(file.requests) for file in imported.files if file.requests}
        assert counts == {"one": 2, "two": 3}


def test_a_failure_that_may_be_of_several_inputs_leaves_out_nothing_and_is_noted(tmp_path: Path) -> None:
    (first, results), (second, _) = batch(tmp_path / "one", "Hi", "1"), batch(tmp_path / "two", "And?")
    results = results.rename(tmp_path / "results.jsonl")

    imported = import_files([first, second, results])

    assert len(imported.requests) == 6
    assert imported.files[2].notes[1:] == ["1 failed here with an id that several inputs have: nothing is left out"]
    assert len(import_files([first, results]).requests) == 2


def test_files_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    files = import_files([*batch(tmp_path / "one", "Hi"), batch(tmp_path / "two", "And?")[0]]).files

    assert [file.label for file in files] == [
        str(tmp_path / "one" / "input.jsonl"),
        "output.jsonl",
        str(tmp_path / "two" / "input.jsonl"),
    ]
