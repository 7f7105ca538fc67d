"""Several files and folders as one trace."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import orjson
import pytest
from foreign_examples import EXAMPLES

from kvaudit.errors import TraceError
from kvaudit.traces.hash_only import MOONCAKE, HashesOnlyError
from kvaudit.traces.importing import Imported, import_files

USER = {"role": "user", "content": "Hi"}


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def chat(text: str = "Hi", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


def ids(imported: Imported) -> list[str]:
    return [request.request_id for request in imported.requests]


def test_files_follow_each_other_and_places_name_their_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", chat("one"), chat("two", id="x"))
    second = write(tmp_path / "b.jsonl", chat("one"), chat("other", id="x"))

    imported = import_files([second, first])

    assert ids(imported) == ["b.jsonl:line-1", "x", "a.jsonl:line-1", "a.jsonl:x"]
    assert [request.ordinal for request in imported.requests] == [0, 1, 2, 3]
    assert imported.notes == []


def test_files_of_one_name_keep_their_requests_apart(tmp_path: Path) -> None:
    paths = [write(tmp_path / folder / "log", chat("one")) for folder in "abc"]

    assert ids(import_files(paths)) == ["log:line-1", "log-2:line-1", "log-3:line-1"]


def test_the_same_request_in_two_files_is_one(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", chat("one", id="x"), chat("two", id="y"))
    second = write(tmp_path / "b.jsonl", chat("three", id="z"), chat("two", id="y"))

    imported = import_files([first, second])

    assert ids(imported) == ["x", "y", "z"]
    assert imported.files[1].left_out == [
        {"reason": "has an id and a prompt that came before in another file", "count": 1, "places": ["line 2 (y)"]}
    ]


def test_files_with_times_are_interleaved(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", chat(id="1", timestamp=1), chat(id="3", timestamp=3))
    second = write(tmp_path / "b.jsonl", chat(id="2", timestamp=2), chat(id="3b", timestamp=3))

    imported = import_files([first, second])

    assert ids(imported) == ["1", "2", "3", "3b"]
    assert imported.notes == ["requests are sorted by their times, which are not in order in the files"]


def test_files_without_all_times_stay_in_their_order_and_say_so(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", chat(id="2", timestamp=2))
    second = write(tmp_path / "b.jsonl", chat(id="1", timestamp=1), chat(id="0"))

    imported = import_files([first, second])

    assert ids(imported) == ["2", "1", "0"]
    assert imported.notes == ["1 of 3 requests have no time: they are in the order of the files"]


def test_results_of_a_batch_take_failed_requests_out_of_its_input(tmp_path: Path) -> None:
    requests = [{"custom_id": name, "body": {"messages": [USER]}} for name in "ab"]
    results = [
        {"custom_id": "a", "response": {"status_code": 500}},
        {"custom_id": "b", "response": {"status_code": 200}},
    ]

    other = write(tmp_path / "chats", chat(id="a"))

    imported = import_files([write(tmp_path / "results", *results), other, write(tmp_path / "input", *requests)])

    assert ids(imported) == ["a", "b"]
    assert [file.left_out for file in imported.files] == [
        [],
        [],
        [{"reason": "failed (status 500)", "count": 1, "places": ["line 1 (a)"]}],
    ]


def test_every_file_of_a_folder_is_read_by_its_own_format(tmp_path: Path) -> None:
    for at, (name, text, _) in enumerate(EXAMPLES):
        path = tmp_path / "logs" / f"{at // 3}" / f"{at:02}-{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write(tmp_path / "logs" / ".hidden", {"x": 1})
    (tmp_path / "logs" / "README").write_text("What this is.\n")
    (tmp_path / "logs" / "empty").write_text("")
    (tmp_path / "logs" / "mooncake").write_text(MOONCAKE)
    write(tmp_path / "logs" / "none-left", {"messages": []})
    output = write(tmp_path / "logs" / "trace.jsonl", {"x": 1})

    imported = import_files([tmp_path / "logs"], leave=output)

    assert [file.format for file in imported.files if Path(file.name).parent.name.isdigit()] == [
        name for name, *_ in EXAMPLES
    ]
    assert len(imported.requests) == len({request.request_id for request in imported.requests})
    refused = {
        Path(file.name).name: file.refusal for file in imported.files if file.refusal or file.name.endswith("none-left")
    }
    assert list(refused) == ["README", "empty", "mooncake", "none-left"]
    assert refused["empty"] == "it is empty"
    assert str(refused["mooncake"]).startswith("a Mooncake trace: ")
    assert imported.files[-1].left_out[0]["reason"] == "has no messages"


def test_a_file_that_is_named_must_hold_requests(tmp_path: Path) -> None:
    good = write(tmp_path / "good", chat())
    (tmp_path / "hashes").write_text(MOONCAKE)

    with pytest.raises(HashesOnlyError):
        import_files([good, tmp_path / "hashes"])
    with pytest.raises(TraceError, match="in no known trace format"):
        import_files([good, write(tmp_path / "other", {"x": 1})])
    with pytest.raises(TraceError, match="holds no request that can be replayed"):
        import_files([good, write(tmp_path / "none", {"messages": []})])


def test_a_file_of_a_folder_that_cannot_be_read_is_left_out_and_stops_nothing(tmp_path: Path) -> None:
    sound = write(tmp_path / "logs" / "sound", chat())
    write(tmp_path / "logs" / "broken-trace", {"kvaudit_trace": 1}, {"segment": 7})
    (tmp_path / "logs" / "broken").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"mess\n{\n')
    (tmp_path / "logs" / "damaged.gz").write_bytes(gzip.compress(sound.read_bytes())[:12] + b"no deflated data")
    (tmp_path / "logs" / "packed.zip").write_bytes(b"PK\x03\x04rest")

    imported = import_files([tmp_path / "logs"])

    assert ids(imported) == ["sound:line-1"]
    refused = {Path(file.name).name: str(file.refusal) for file in imported.files if file.refusal}
    assert refused.keys() == {"broken-trace", "broken", "damaged.gz", "packed.zip"}
    assert refused["broken-trace"].startswith("line 2: segment 7 ")
    assert refused["broken"].startswith("line 2: broken JSON")
    assert refused["damaged.gz"] == "line 1: cannot be read: its gzip data is damaged"
    assert refused["packed.zip"] == "a zip archive: unpack it first"


def test_what_may_not_be_looked_at_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For root nothing is forbidden: the system's answers are given here."""
    write(tmp_path / "logs" / "sound", chat())
    write(tmp_path / "logs" / "shut" / "inside", chat())
    write(tmp_path / "logs" / "no-list" / "unseen", chat())
    scandir, is_file, opened = os.scandir, Path.is_file, Path.open

    def listed(path: str) -> object:
        if str(path).endswith("no-list"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def forbidden(path: Path) -> bool:
        if "shut" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    def refused(path: Path, *arguments: object, **options: object) -> object:
        if {"shut", "no-list"} & set(path.parts):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(Path, "is_file", forbidden)
    monkeypatch.setattr(Path, "open", refused)
    imported = import_files([tmp_path / "logs"])

    assert [(Path(file.name).name, file.refusal) for file in imported.files] == [
        ("no-list", "cannot be opened: Permission denied"),
        ("inside", "cannot be opened: Permission denied"),
        ("sound", None),
    ]


def test_results_without_their_input_are_told_to_be_that(tmp_path: Path) -> None:
    results = write(tmp_path / "results", {"custom_id": "a", "response": {"status_code": 200}})

    with pytest.raises(TraceError, match="nothing can be replayed of") as caught:
        import_files([results])
    assert caught.value.hint == "results: holds results, no prompts; import results with their input"


def test_where_all_requests_of_a_folder_are_left_out_it_says_why(tmp_path: Path) -> None:
    for name in "abcde":
        write(tmp_path / "logs" / name, {"messages": []})

    with pytest.raises(TraceError, match="nothing can be replayed of") as caught:
        import_files([tmp_path / "logs"])
    assert caught.value.hint == "a and 4 more: left out 1 has no messages: line 1 (the request)"


def test_a_folder_with_nothing_to_replay_says_why(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(TraceError, match="is a folder without files"):
        import_files([tmp_path / "logs"])

    (tmp_path / "logs" / "hashes").write_text(MOONCAKE)
    (tmp_path / "logs" / "more").write_text(MOONCAKE)
    with pytest.raises(TraceError, match=r"nothing can be replayed of .*") as caught:
        import_files([tmp_path / "logs"])
    hint = str(caught.value.hint)
    assert hint.startswith("hashes and 1 more: a Mooncake trace: ")
    assert hint.endswith("; kvaudit inspect says what a prefix cache could reuse of hashes")


def test_the_header_says_where_requests_came_from(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", chat("one"), chat("two", status=500))

    assert import_files([first]).header() == {
        "source": ["a.jsonl"],
        "imported": [
            {
                "file": "a.jsonl",
                "format": "messages",
                "records": 2,
                "requests": 1,
                "left_out": [{"reason": "failed (status 500)", "count": 1, "places": ["line 2"]}],
            }
        ],
    }
