import logging
import time
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from worker_jobs import job_of

from kvaudit.engines.vllm.worker import lmcache_api, serving
from kvaudit.engines.vllm.worker.lmcache_api import Put, Stored
from kvaudit.engines.vllm.worker.session import NOT_STORED, Session

PARTS = (("instruction", (1, 2, 3)), ("document", (10, 11, 12)), ("query", (30, 31)))
CHUNKS = [(0, 3, "a"), (5, 8, "b"), (10, 12, "c")]


@pytest.fixture
def held(monkeypatch):
    """What LMCache's store holds, in a process that has an engine of two layers."""
    held = {}
    monkeypatch.setattr(lmcache_api, "engine", lambda: SimpleNamespace(num_layers=2))
    monkeypatch.setattr(lmcache_api, "trouble", lambda engine: None)
    monkeypatch.setattr(lmcache_api, "blender", lambda: object())
    monkeypatch.setattr(lmcache_api, "split", lambda engine, ids: CHUNKS)
    monkeypatch.setattr(lmcache_api, "stored", lambda engine: dict(held))
    return held


def serve(session, looked_up=0, job=None, ranges=()):
    session.begin(job or job_of(*PARTS))
    session.now.looked_up = looked_up
    if ranges:
        session.loading(list(ranges))
    return session


def store(session, held, *keys):
    for start, end, key in CHUNKS:
        if key in keys:
            session.putting([Put(key, start, end - start, 10, key in held)])
            held[key] = Stored(end - start, start, 2, 10)


def test_the_first_writer_stays_in_the_ledger(held):
    session = serve(Session(), job=job_of(*PARTS, request_id="first"))
    store(session, held, "a", "b", "c")
    record = session.finish()
    assert [w.write_ordinal for w in record.writes] == [0, 1, 2]
    assert record.errors == ()
    assert [chunk.stored for chunk in record.chunks] == [True] * 3
    serve(session, looked_up=12, job=job_of(*PARTS, request_id="second"), ranges=[(0, 3), (5, 8), (10, 12)])
    session.now.blended = object()
    store(session, held, "b")
    record = session.finish()
    assert record.writes == ()
    assert {p.writer_request_id for p in record.provenance} == {"first"}
    assert record.reused_tokens == 8


@pytest.mark.parametrize(
    ("layers", "looked_up", "told"),
    [(2, 0, "lookup found 0 tokens where its store held 8"), (1, 0, None), (1, 8, "where its store held 0")],
)
def test_a_lookup_that_differs_from_the_store_is_an_error(held, layers, looked_up, told):
    held["a"] = Stored(3, 0, layers, 10)
    held["b"] = Stored(3, 5, 2, 10)
    session = serve(Session(), looked_up=looked_up, ranges=[(0, 3), (5, 8)] if looked_up else ())
    session.now.blended = object() if looked_up else None
    errors = session.finish().errors
    assert errors == () if told is None else told in errors[0]


def test_loads_that_fall_short_or_are_not_blended_are_errors(held):
    held.update(a=Stored(3, 0, 2, 10), b=Stored(3, 5, 2, 10))
    errors = serve(Session(), looked_up=8, ranges=[(0, 3)]).finish().errors
    assert any("loaded chunks up to 3" in error for error in errors)
    assert any("blended nothing" in error for error in errors)


def test_a_prompt_that_never_reached_lmcache_is_an_error(held):
    session = Session()
    session.begin(job_of(*PARTS))
    assert "never asked" in session.finish().errors[0]


def test_a_full_prefill_that_loads_is_an_error(held):
    session = serve(Session(), job=job_of(*PARTS, mode="prefill"), ranges=[(0, 3)])
    assert session.serving is None
    assert "full prefill" in session.finish().errors[0]


def test_a_full_prefill_that_stores_is_an_error(held):
    session = serve(Session(), job=job_of(*PARTS, mode="prefill"))
    store(session, held, "a")
    assert session.finish().errors == ("a full prefill stored chunks",)


def test_a_chunk_without_its_position_is_an_error_and_no_write(held):
    session = serve(Session())
    session.putting([Put("a", None, 3, 10, False)])
    record = session.finish()
    assert record.writes == ()
    assert record.errors == ("LMCache stored chunk a and did not keep where it stood",)


def test_lmcache_that_stops_storing_is_an_error(held):
    logger = logging.getLogger("lmcache.tests.of.kvaudit.memory")
    logger.propagate = False
    session = serve(Session())
    logger.warning(f"{NOT_STORED} so choosing to not store the KV cache.")
    logger.warning("Pin count of MemoryObj %s is negative: %s", 7, -1)
    record = session.finish()
    assert record.errors == (f"LMCache: {NOT_STORED} so choosing to not store the KV cache.",)
    assert record.warnings == ()


@pytest.mark.real
@pytest.mark.parametrize(
    ("module", "told"),
    [("lmcache/v1/cache_engine.py", NOT_STORED), ("lmcache/v1/memory_management.py", "Pin count of MemoryObj")],
)
def test_lmcache_itself_says_it_so(module, told):
    assert f'"{told}' in (Path(find_spec("lmcache").origin).parents[1] / module).read_text()


def test_a_warning_that_comes_often_does_not_fill_the_log(held, capsys):
    logger = logging.getLogger("lmcache.tests.of.kvaudit.repeats")
    logger.propagate = False
    handler = logging.StreamHandler(stream := StringIO())
    logger.addHandler(handler)
    session = Session()
    for prompt in range(4):
        serve(session)
        for number in range(5):
            logger.warning("Pin count of %s is negative in %s", number, prompt)
            logger.error("error %s", number)
        assert "(5 times)" in session.finish().warnings[0]
    assert stream.getvalue().count("Pin count") == 3
    assert stream.getvalue().count("error") == 20


def test_observing_begins_when_a_gpu_has_done_what_came_before(held, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (time.sleep(0.05), waited.append(True)))
    seen = serve(Session()).now
    with seen.untimed():
        assert waited
    assert seen.untimed_seconds < 0.05


def test_what_the_ledger_costs_is_no_part_of_ttft(held, monkeypatch):
    monkeypatch.setattr(lmcache_api, "puts", lambda *_: time.sleep(0.02) or [Put("a", 0, 3, 10, False)])
    session = serve(Session())
    assert serving._putting(session, lambda *_: "put")(None, (), ()) == "put"
    assert session.now.untimed_seconds >= 0.02
    assert len(session.finish().writes) == 1
    serving._putting(session, lambda *_: None)(None, (), ())


def test_an_engine_that_is_not_there_is_an_error(held, monkeypatch):
    monkeypatch.setattr(lmcache_api, "engine", lambda: None)
    monkeypatch.setattr(lmcache_api, "trouble", lambda engine: "LMCache made no engine")
    assert serve(Session()).finish().errors[0] == "LMCache made no engine"


def test_a_blender_that_is_not_there_is_an_error(held, monkeypatch):
    monkeypatch.setattr(lmcache_api, "blender", lambda: None)
    assert "no blender" in serve(Session()).finish().errors[0]


def test_what_is_stored_outside_a_job_is_told_with_the_next(held):
    session = Session()
    store(session, held, "a")
    held.clear()
    assert "no job" in serve(session).finish().errors[0]
    with pytest.raises(RuntimeError, match="no job"):
        session.finish()


def test_evictions_are_seen_in_the_store(held):
    session = serve(Session())
    store(session, held, "a", "b")
    session.finish()
    del held["a"]
    record = serve(session).finish()
    assert [e.write_ordinal for e in record.evictions] == [0]


@pytest.mark.parametrize("level", [logging.NOTSET, logging.CRITICAL], ids=["as-it-is", "silenced"])
def test_lmcaches_log_is_listened_to_while_a_job_runs(held, level):
    logger = logging.getLogger(f"lmcache.tests.of.kvaudit.{level}")
    logger.propagate = False
    logger.setLevel(level)
    session = serve(Session())
    logger.error("Error processing lookup request: %s", "gone")
    for number in range(3):
        logger.warning("Pin count of %s is negative", number)
    logger.info("nothing")
    record = session.finish()
    assert record.errors == ("LMCache: Error processing lookup request: gone",)
    assert record.warnings == ("LMCache: Pin count of 0 is negative (3 times)",)
    assert serve(session).finish().errors == ()
    logger.error("a thread died")
    assert serve(session).finish().errors == ("LMCache: a thread died",)
