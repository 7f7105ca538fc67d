"""The engine `vllm` on real vLLM: its prefix cache as the reuse under audit, and full prefill beside it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
from real_prompts import fixture_requests

from kvaudit.engines import EngineSettings, logs_in
from kvaudit.engines.vllm import open_vllm
from kvaudit.errors import EngineError
from kvaudit.policies.as_served import AsServed

pytestmark = [pytest.mark.real, pytest.mark.model]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def engine(logs):
    with logs_in(logs):
        opened = open_vllm(EngineSettings(options={"max-model-len": "1024", "answer-timeout": "120"}))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def asked(engine):
    return fixture_requests(engine, 1)[0]


def serve(engine, asked, policy=None, reference=None):
    return engine.serve(asked.request_id, "request", asked.prompt, asked.sampling, policy, reference)


def test_full_prefill_neither_reads_nor_writes_what_the_audit_sees(engine, asked):
    assert engine.reset().entries == 0, "the first emptying is looked after too"
    full = serve(engine, asked)
    assert (full.reused_tokens, full.answer_text) == (0, asked.expected)
    cold = serve(engine, asked, AsServed(), full.reference)
    assert cold.reused_tokens == 0, "full prefill left something in the cache"
    warm = serve(engine, asked, AsServed(), full.reference)
    assert warm.reused_tokens >= 128
    again = serve(engine, asked, None, full.reference)
    assert again.reused_tokens == 0
    assert serve(engine, asked, AsServed(), full.reference).reused_tokens == warm.reused_tokens
    assert (again.answer_ids, again.kl) == (full.answer_ids, 0.0)
    assert warm.answer_ids == full.answer_ids
    assert warm.kl == pytest.approx(0.0, abs=1e-5)
    assert warm.ttft_ms < warm.total_ms


def test_a_reset_is_seen_to_have_worked(engine, asked, monkeypatch):
    with monkeypatch.context() as lying:
        lying.setattr(engine._running, "reset_prefix_cache", lambda: True)
        assert engine.reset().entries > 0, "seen before anything was served"
    serve(engine, asked, AsServed())
    assert engine.reset().entries == 0
    assert serve(engine, asked, AsServed()).reused_tokens == 0
    with monkeypatch.context() as lying:
        lying.setattr(engine._running, "reset_prefix_cache", lambda: True)
        assert engine.reset().entries > 0
    assert engine.reset().entries == 0


def test_an_answer_ends_as_its_limit_says(engine, asked):
    short = replace(asked, sampling=replace(asked.sampling, max_tokens=3))
    served = serve(engine, short)
    assert (len(served.answer_ids), served.finish_reason) == (3, "length")
    assert serve(engine, asked).finish_reason == "stop"


def test_a_crashed_engine_is_told_with_the_end_of_its_log(engine, logs, asked, capfd):
    (log,) = logs.glob("*.log")
    (process,) = engine._running._processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"vLLM failed: (EngineDeadError|its process ended)") as raised:
        serve(engine, asked)
    assert str(log) in raised.value.hint
    assert "INFO" in raised.value.hint
    assert capfd.readouterr().out == ""
