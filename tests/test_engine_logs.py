"""Engines with processes of their own keep their logs in the run folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvaudit.engines import EngineSettings, log_folder, logs_in
from kvaudit.engines.scripted import open_engine
from kvaudit.errors import EngineError
from kvaudit.plan import make_plan
from kvaudit.records import Request, Segment, Trace
from kvaudit.replay import replay
from kvaudit.store import new_manifest, open_folder
from kvaudit.store.folder import remove_run
from kvaudit.store.layout import ENGINE_LOGS

REQUEST = Request("r1", 0, (Segment("document", "d", "text"), Segment("query", "q", "?")))
TRACE = Trace((REQUEST, replace(REQUEST, request_id="r2", ordinal=1)), "digest", "trace.jsonl")


def replayed(path, opened):
    plan = make_plan(len(TRACE.requests), "scripted", EngineSettings(), ["token-topk"], 2)
    with open_folder(path, new_manifest(TRACE, plan, 0.01)) as folder:
        replay(TRACE, opened, plan, folder)


def logging_engine(fails=False):
    folder = log_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.log").write_text("ready")
    if fails:
        raise EngineError("it does not start")
    return open_engine(EngineSettings())


def test_nobody_says_where_logs_go_outside_a_run(tmp_path):
    assert log_folder() is None
    with logs_in(tmp_path):
        assert log_folder() == tmp_path
    assert log_folder() is None


def test_an_engine_that_is_opened_for_a_run_logs_there(tmp_path):
    replayed(tmp_path / "run", logging_engine)
    assert (tmp_path / "run" / ENGINE_LOGS / "engine.log").read_text() == "ready"


def test_the_log_of_an_engine_that_did_not_start_is_kept_and_in_nobodys_way(tmp_path):
    with pytest.raises(EngineError, match="does not start"):
        replayed(tmp_path / "run", lambda: logging_engine(fails=True))
    assert (tmp_path / "run" / ENGINE_LOGS / "engine.log").exists()
    replayed(tmp_path / "run", logging_engine)


def test_a_run_is_removed_with_its_logs(tmp_path):
    replayed(tmp_path / "run", logging_engine)
    remove_run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
