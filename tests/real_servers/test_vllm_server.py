"""vLLM's own server under an audit, with what it offers to see and to empty its prefix cache."""

import importlib.util
from contextlib import contextmanager

import pytest
from server_audits import MODEL, audited, chats, settings
from server_processes import free_port, running

from kvaudit.engines.server import open_engine
from kvaudit.engines.vllm.folder import model_folder
from kvaudit.errors import EngineError
from kvaudit.policies.as_served import AsServed
from kvaudit.records import Prompt, PromptSegment, Sampling, Wording

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]
COUNTING = Wording(text="1, 2, 3, 4, 5, 6, 7, 8,")
LONG = Wording(text=" ".join(f"Line {number} holds {number * 7919 % 1000}." for number in range(40)))


@contextmanager
def vllm(log, *arguments, **environment):
    port = free_port()
    command = [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model_folder(MODEL).path),
        "--served-model-name",
        MODEL,
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--enforce-eager", "--enable-prefix-caching", *arguments]
    small = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    no_plugins = {"VLLM_PLUGINS": ""}
    with running(command, port, log / "vllm.log", small | no_plugins | environment) as url:
        yield url


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """With all that an audit can make use of."""
    log = tmp_path_factory.mktemp("vllm")
    with vllm(log, "--enable-prompt-tokens-details", VLLM_SERVER_DEV_MODE="1") as url:
        yield url


def served(engine, wording, length, sampling):
    prompt = Prompt((), (PromptSegment("document", "0" * 16, 0, length),), wording)
    return engine.serve("r", "request", prompt, sampling, AsServed())


def test_an_audit_of_its_prefix_cache(server, tmp_path):
    audit, rows = audited(tmp_path / "run", chats(tmp_path), settings(server, reset="vllm"))
    (finding,) = audit.findings
    assert (finding.seen, finding.reasons) == ("none-seen", ())
    assert {row["attempts"] for row in rows} == {1}
    assert all(row["answer_ids"] for row in rows)
    engine = audit.manifest["engine"]
    assert engine["reference"] == "a cache_salt of its own for each request"
    assert (engine["reset_verified_by"], engine["cached_tokens_from"]) == ("usage", "usage")
    assert (engine["restarts_seen_by"], engine["fields_left_out"]) == ("/metrics", None)
    for row in rows:
        starts_empty = row["policy"] == "full-prefill" or row["control"] == "reset" or row["position"] == 0
        assert row["reused_tokens"] == 0 if starts_empty else row["reused_tokens"] > 100


@pytest.mark.parametrize("preset", ["vllm", "vllm+connector"])
def test_its_resets_empty_the_cache_and_are_seen_to(server, preset):
    engine = open_engine(settings(server, reset=preset, reference="reset"))
    reused = []
    for _ in range(2):
        assert engine.reset().entries == 0
        reused += [served(engine, LONG, 100, Sampling(1)).reused_tokens for _ in range(2)]
    engine.close()
    assert reused[::2] == [0, 0]
    assert min(reused[1::2]) > 100


def test_limits_stops_and_token_ids(server):
    engine = open_engine(settings(server, reset="vllm"))
    whole = served(engine, COUNTING, 23, Sampling(8))
    assert (whole.finish_reason, whole.prompt_tokens, len(whole.answer_ids)) == ("length", 23, 8)
    stopped = served(engine, COUNTING, 23, Sampling(8, (",",)))
    assert (stopped.finish_reason, stopped.answer_text) == ("stop", whole.answer_text.partition(",")[0])
    assert served(engine, Wording(token_ids=tuple(range(100, 120))), 20, Sampling(2)).prompt_tokens == 20
    engine.close()


def test_as_people_start_it_metrics_count_and_what_a_reset_needs_is_named(tmp_path):
    with vllm(tmp_path) as url:
        engine = open_engine(settings(url, reset="vllm"))
        assert engine.describe()["cached_tokens_from"] == "metrics"
        served(engine, LONG, 100, Sampling(1))
        assert served(engine, LONG, 100, Sampling(1)).reused_tokens > 100
        with pytest.raises(
            EngineError, match=r"cannot be emptied: POST .*/reset_prefix_cache answers status 404"
        ) as error:
            engine.reset()
        engine.close()
    assert "VLLM_SERVER_DEV_MODE=1" in error.value.hint
