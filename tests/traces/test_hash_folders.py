"""WEKA traces as they are shared: a folder with one file a session."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from kvaudit.cli import app
from kvaudit.errors import TraceError
from kvaudit.records import HashedRequest
from kvaudit.traces.hash_only import HashedTrace
from kvaudit.traces.importing import import_files
from kvaudit.traces.streaming import open_trace


def session(path: Path, name: str, *times: float, **fields: object) -> Path:
    turns = [{"t": time, "type": "s", "in": 9, "out": 2, "hash_ids": [1, 2]} for time in times]
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {"id": name, "models": ["m"], "block_size": 4, "requests": turns, **fields}
    path.write_bytes(orjson.dumps(written, option=orjson.OPT_INDENT_2))
    return path


def opened(folder: Path) -> tuple[list[HashedRequest], HashedTrace]:
    with open_trace(folder) as trace:
        assert isinstance(trace, HashedTrace)
        return list(trace.requests), trace


def test_sessions_follow_each_other_in_the_order_of_their_files(tmp_path: Path) -> None:
    session(tmp_path / "b.json", "second", 0, 3)
    session(tmp_path / "a.json", "first", 0)
    session(tmp_path / "c" / "a.json", "third", 0)

    requests, trace = opened(tmp_path)

    assert [request.request_id for request in requests] == ["first:1", "second:1", "second:2", "third:1"]
    assert [request.ordinal for request in requests] == [0, 1, 2, 3]
    assert [request.namespace for request in requests] == ["1", "2", "2", "3"]
    assert (trace.name, trace.block_tokens, trace.is_stated) == ("WEKA", 4, True)
    assert trace.notes == ["3 sessions have no common clock: they are served one after another"]


def test_a_file_may_hold_several_sessions(tmp_path: Path) -> None:
    turn = {"t": 0, "in": 9, "out": 2, "hash_ids": [1]}
    lines = [orjson.dumps({"id": name, "block_size": 4, "requests": [turn]}) for name in "ab"]
    (tmp_path / "a").write_bytes(b"\n".join([*lines, b"{broken"]))
    session(tmp_path / "b", "c", 0)

    requests, trace = opened(tmp_path)

    assert [request.request_id for request in requests] == ["a:1", "b:1", "c:1"]
    assert trace.notes[0].startswith("a: left out 1 broken JSON: line 3 (")


def test_global_ids_are_one_namespace_over_all_files(tmp_path: Path) -> None:
    for name in "ab":
        session(tmp_path / name, name, 0, hash_id_scope="global")

    assert [request.namespace for request in opened(tmp_path)[0]] == ["", ""]


def test_other_files_are_left_out_and_named(tmp_path: Path) -> None:
    session(tmp_path / "b.json", "s", 0)
    session(tmp_path / "c.json", "t", 0, block_size=8)
    session(tmp_path / "d.json", "u", 0, block_size=None)
    session(tmp_path / ".hidden.json", "v", 0)
    (tmp_path / "e.json").write_bytes((tmp_path / "b.json").read_bytes()[:-5])
    (tmp_path / "README").write_text("Words.\n")
    (tmp_path / "empty").write_bytes(b"")

    requests, trace = opened(tmp_path)

    assert [request.request_id for request in requests] == ["s:1"]
    rows = {row["reason"].partition(":")[0]: row["places"] for row in trace.tally.rows()}
    assert {reason: [place.partition(" (")[2] for place in places] for reason, places in rows.items()} == {
        "is no WEKA trace": ["README)", "empty)"],
        "the session has blocks of 8 tokens, and the first one of 4": [""],
        "line 1": ["d.json)"],
        next(reason for reason in rows if reason.startswith("line") and reason != "line 1"): ["e.json)"],
    }


def test_a_folder_without_a_session_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("Words.\n")

    with pytest.raises(TraceError, match="is a folder, and none of its files is a WEKA trace"):
        opened(tmp_path)


def test_an_import_says_why_a_folder_of_them_cannot_be_replayed(tmp_path: Path) -> None:
    for name in "abc":
        session(tmp_path / "logs" / name, name, 0)

    with pytest.raises(TraceError, match="nothing can be replayed of") as caught:
        import_files([tmp_path / "logs"])

    assert str(caught.value.hint).startswith("a and 2 more: a WEKA trace: lengths and hashes of prefixes without ")


def test_beside_logs_with_prompts_they_are_named_in_the_table(tmp_path: Path) -> None:
    session(tmp_path / "logs" / "a", "a", 0)
    (tmp_path / "logs" / "b").write_bytes(b'{"messages": [{"role": "user", "content": "Hi"}]}\n')

    imported = import_files([tmp_path / "logs"])

    assert len(imported.requests) == 1
    assert [(file.format, bool(file.refusal)) for file in imported.files] == [("weka", True), ("messages", False)]


def test_inspect_takes_the_folder(tmp_path: Path) -> None:
    session(tmp_path / "logs" / "a", "a", 0, 1)
    session(tmp_path / "logs" / "b", "b", 0)

    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "logs"), "-f", "json"])

    assert result.exit_code == 0, result.output
    assert orjson.loads(result.stdout)["counts"]["requests"] == 3
