"""llama.cpp's own server under an audit: its slots, its counters, and its reuse of chunks that have moved."""

import json
from contextlib import contextmanager

import pytest
from server_audits import MODEL, audited, chats, settings, windows
from server_processes import LLAMACPP, free_port, running

from kvaudit.engines.server import open_engine
from kvaudit.errors import EngineError
from kvaudit.models.files import resolve_model
from kvaudit.policies.as_served import AsServed
from kvaudit.records import Prompt, PromptSegment, Sampling, Wording
from kvaudit.wordings import Wordings

pytestmark = pytest.mark.real
pytest.importorskip("xllamacpp", reason="the wheel of xllamacpp carries llama.cpp's server")


@contextmanager
def llamacpp(folder, **parameters):
    """The address of a server with one slot that can be erased, and without a cache behind the slots."""
    files = resolve_model(MODEL)
    port = free_port()
    given = {
        "model.path": str(files.folder / files.gguf_file),
        "model_alias": [MODEL],
        "port": port,
        "n_ctx": 4096,
        "n_parallel": 1,
        "cpuparams.n_threads": 1,
        "cpuparams_batch.n_threads": 1,
        "endpoint_slots": True,
        "endpoint_metrics": True,
        "slot_save_path": f"{folder}/",
        "cache_ram_mib": 0,
        **parameters,
    }
    with running(["-c", LLAMACPP, json.dumps(given)], port, folder / "llamacpp.log") as url:
        yield url


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with llamacpp(tmp_path_factory.mktemp("llamacpp")) as url:
        yield url


@pytest.fixture
def engine(server):
    opened = open_engine(settings(server, reset="llamacpp"))
    yield opened
    opened.close()


def served(engine, wording, length, sampling):
    prompt = Prompt((), (PromptSegment("document", "0" * 16, 0, length),), wording)
    return engine.serve("r", "request", prompt, sampling, AsServed())


def test_an_audit_of_its_prefix_cache(server, tmp_path):
    """Nothing but a change of so few answers, which luck may have repeated, keeps it from a conclusion; what it finds
    hangs on how the processor rounds a prompt that is computed in two parts."""
    audit, rows = audited(tmp_path / "run", chats(tmp_path), settings(server, reset="llamacpp"))
    (finding,) = audit.findings
    assert {reason.code for reason in finding.reasons} <= {"noise-possible"}
    assert {row["attempts"] for row in rows} == {1}
    assert {row["cache_entries_before"] for row in rows} == {0, None}
    engine = audit.manifest["engine"]
    assert engine["reference"] == "the cache emptied before each request"
    assert (engine["reset_verified_by"], engine["cached_tokens_from"]) == ("usage", "usage")
    assert (engine["restarts_seen_by"], engine["fields_left_out"]) == ("/metrics", None)
    for row in rows:
        starts_empty = row["policy"] == "full-prefill" or row["control"] == "reset" or row["position"] == 0
        assert row["reused_tokens"] == 0 if starts_empty else row["reused_tokens"] > 100


def test_it_ignores_cache_salt_and_is_not_believed(server):
    with pytest.raises(EngineError, match="does not keep requests of different cache_salt apart"):
        open_engine(settings(server, reset="llamacpp", reference="salt"))


def test_limits_stops_and_token_ids(engine):
    counting = Wording(text="1, 2, 3, 4, 5, 6, 7, 8,")
    whole = served(engine, counting, 23, Sampling(8))
    assert (whole.finish_reason, whole.prompt_tokens) == ("length", 23)
    stopped = served(engine, counting, 23, Sampling(8, (",",)))
    assert (stopped.finish_reason, stopped.answer_text) == ("stop", whole.answer_text.partition(",")[0])
    assert served(engine, Wording(token_ids=tuple(range(100, 120))), 20, Sampling(2)).prompt_tokens == 20


def test_chunks_that_have_moved_count_as_reused_behind_cache_reuse(tmp_path):
    """`--cache-reuse` shifts KV of runs that stand elsewhere in the new prompt, computed behind other documents."""
    first, second = windows(2).requests
    with llamacpp(tmp_path, n_cache_reuse=16) as url:
        engine = open_engine(settings(url, reset="llamacpp"))
        wordings = Wordings()
        prompts = [wordings.request(request) for request in (first, second)]
        assert engine.reset().entries == 0
        answers = [engine.serve("r", "request", prompt, Sampling(1), AsServed()) for prompt in prompts]
        engine.close()
    assert answers[0].reused_tokens == 0
    assert answers[1].reused_tokens > answers[1].prompt_tokens / 2


def test_what_a_cache_behind_the_slots_brings_back_after_a_reset_is_counted(tmp_path):
    """`--cache-ram` keeps prompts that left a slot, and erasing slots does not empty it."""
    first, second = (Wording(text=" ".join(f"{name} {number}." for number in range(40))) for name in ("one", "two"))
    with llamacpp(tmp_path, cache_ram_mib=256) as url:
        engine = open_engine(settings(url, reset="llamacpp"))
        engine.reset()
        for wording in (first, second):
            served(engine, wording, 300, Sampling(1))
        engine.reset()
        again = served(engine, first, 300, Sampling(1))
        engine.close()
    assert again.reused_tokens > 100


def test_what_the_slots_need_is_named(tmp_path):
    with (
        llamacpp(tmp_path, slot_save_path="") as url,
        pytest.raises(EngineError, match=r"cannot be emptied: POST .*action=erase") as error,
    ):
        open_engine(settings(url, reset="llamacpp")).reset()
    assert "--slot-save-path" in error.value.hint
