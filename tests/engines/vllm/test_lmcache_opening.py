"""How the engine `lmcache` is set up, how it looks after LMCache, and how a prompt's chunks are held to the trace's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.scripted import ByteTokenizer
from kvaudit.engines.vllm import lmcache
from kvaudit.engines.vllm.chunking import Chunking
from kvaudit.engines.vllm.lmcache import LmcacheEngine
from kvaudit.engines.vllm.opening import _check_health, lmcache_environment
from kvaudit.engines.vllm.options import read_options
from kvaudit.engines.vllm.resetting import prove
from kvaudit.engines.vllm.settings import CAPACITY, CHECK_LAYERS, CHUNK_SIZE, RATIOS, SPECIAL_STRING, as_lmcache_reads
from kvaudit.engines.vllm.worker.job import Chunk, Job, Record
from kvaudit.errors import EngineError, UsageError
from kvaudit.policies.lmcache_default import LmcacheDefault
from kvaudit.records import CacheState, Prompt, PromptSegment, Reference, Sampling, Served


class NoBegin(ByteTokenizer):
    leading_ids = ()


def environment(given=None, tokenizer=None, device="cuda", switches=None, **options):
    settings = EngineSettings(recompute_ratio=0.25, switches=switches or Switches(), options=options)
    place = SimpleNamespace(tokenizer=tokenizer or NoBegin(), device=device)
    return lmcache_environment(place, settings, read_options("lmcache", settings), given or {})


def test_blending_is_switched_on_with_kvaudits_settings():
    separator, made = environment()
    assert bytes(separator) == b" # # "
    assert (made["LMCACHE_ENABLE_BLENDING"], made["LMCACHE_USE_LAYERWISE"]) == ("True", "True")
    assert (made[CHECK_LAYERS], made[RATIOS], made[CHUNK_SIZE]) == ("1", "0.25", "16")
    assert CAPACITY not in made


def test_lmcache_is_told_a_separator_of_which_it_drops_the_first_token():
    _, made = environment()
    assert as_lmcache_reads(made[SPECIAL_STRING]) == "x # # "
    _, made = environment(tokenizer=ByteTokenizer())
    assert as_lmcache_reads(made[SPECIAL_STRING]) == " # # "


def test_a_separator_of_the_traces_own_is_an_option():
    separator, made = environment(separator="\n\n")
    assert bytes(separator) == b"\n\n"
    assert as_lmcache_reads(made[SPECIAL_STRING]) == "x\n\n"


def test_the_cache_gets_the_room_that_is_asked_for_and_little_on_the_cpu():
    assert environment(switches=Switches(capacity_bytes=3 << 29))[1][CAPACITY] == "1.5"
    assert environment(device="cpu")[1][CAPACITY] == "1"
    assert environment({CAPACITY: "7"}, device="cpu")[1][CAPACITY] == "7"


def test_a_users_own_settings_are_in_force():
    _, made = environment({CHUNK_SIZE: "256", "LMCACHE_CACHE_POLICY": "LFU", "HOME": "/root"})
    assert (made[CHUNK_SIZE], made["LMCACHE_CACHE_POLICY"]) == ("256", "LFU")
    assert "HOME" not in made


def test_a_users_own_separator_is_taken_as_the_traces():
    separator, made = environment({SPECIAL_STRING: "'||'"})
    assert bytes(separator) == b"||"
    assert made[SPECIAL_STRING] == "'||'"


@pytest.mark.parametrize(
    ("given", "option"),
    [({RATIOS: "0.15"}, "--recompute-ratio"), ({CHECK_LAYERS: "2"}, "--check-layer")],
)
def test_what_both_set_differently_is_refused(given, option):
    with pytest.raises(UsageError, match="in the environment, and kvaudit sets it") as raised:
        environment(given)
    assert option in raised.value.hint
    assert environment({CHECK_LAYERS: "1"})[1][CHECK_LAYERS] == "1"


HEALTHY = {
    "trouble": None,
    "hooked": True,
    "roles": ["SCHEDULER", "WORKER"],
    "blender": True,
    "model_registered": True,
    "shim": False,
    "settings": {"separator_ids": [7, 9], "backends": ["LocalCPUBackend"]},
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"trouble": "LMCache made no engine"}, "LMCache made no engine"),
        ({"hooked": False}, "hooks are not in force"),
        ({"blender": False}, "no blender"),
        ({"model_registered": False}, "not registered"),
        ({"shim": True}, "shim is in force on an accelerator"),
        ({"roles": ["WORKER"]}, "not both that serve a prompt"),
        (
            {"settings": {"backends": ["LocalCPUBackend", "GdsBackend"]}},
            "stores in LocalCPUBackend, GdsBackend, and kvaudit can empty",
        ),
        ({"settings": {"separator_ids": [9]}}, r"splits at the token ids \[9\], not at \[7, 9\]"),
    ],
)
def test_what_lmcache_degrades_to_in_silence_is_an_error(changed, told):
    place = SimpleNamespace(device="cuda")
    _check_health({"connector": HEALTHY}, place, (7, 9))
    with pytest.raises(EngineError, match=told):
        _check_health({"connector": HEALTHY | changed}, place, (7, 9))


def test_a_connector_that_is_not_there_is_an_error():
    with pytest.raises(EngineError, match="without LMCache's connector"):
        _check_health({"connector": None}, SimpleNamespace(device="cpu"), (7, 9))


@dataclass
class Caching:
    """Stands for the engine: a cache that holds whole prompts longer than a chunk, and faults that can be planted."""

    chunk_tokens: int = 16
    last_digits: float = 0.0
    clears: bool = True
    stores: bool = True
    admits: bool = False
    drifts: bool = False
    held: set[tuple[int, ...]] = field(default_factory=set)
    served: int = 0

    def serve(self, request_id, part, prompt, sampling, policy, reference=None):
        made = Served((1,), "a", "length", len(prompt.token_ids), margin=1.0)
        if policy is None:
            return replace(made, reference=Reference((1,)))
        assert isinstance(policy, LmcacheDefault)
        assert reference is not None
        self.served += 1
        hit = prompt.token_ids in self.held
        if self.stores and len(prompt.token_ids) > self.chunk_tokens:
            self.held.add(prompt.token_ids)
        margin = float(self.served) if self.drifts else 1.0 + self.last_digits * self.served
        return replace(made, reused_tokens=100 if hit else 0, margin=margin)

    def reset(self):
        if self.clears:
            self.held.clear()
        return CacheState(len(self.held) if self.admits else 0, None)


def test_an_engine_that_reuses_and_empties_its_cache_is_proved():
    engine = Caching()
    prove(engine, (7, 9), 1000, 16)
    assert engine.served == 3
    assert not engine.held


def test_last_digits_are_no_other_answer():
    prove(Caching(last_digits=1e-3), (7, 9), 1000, 16)


@pytest.mark.parametrize("chunk_tokens", [256, 512, 4096])
def test_the_probe_is_longer_than_a_chunk(chunk_tokens):
    prove(Caching(chunk_tokens=chunk_tokens), (7, 9), 1000, chunk_tokens)


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ({"stores": False}, "reused nothing of a prompt that it had just stored"),
        ({"clears": False}, "reset left 100 tokens"),
        ({"clears": False, "admits": True}, "reset left 1 entries"),
        ({"drifts": True}, "another answer than the first time"),
    ],
)
def test_an_engine_that_does_not_is_refused(faults, told):
    with pytest.raises(EngineError, match=told):
        prove(Caching(**faults), (7, 9), 1000, 16)


def test_a_cache_that_is_not_empty_at_first_is_refused():
    before = {_probe_ids(Caching())}
    with pytest.raises(EngineError, match="reused 100 tokens of a prompt that it had never seen"):
        prove(Caching(clears=False, held=before), (7, 9), 1000, 16)


def _probe_ids(engine):
    seen = []
    serve = engine.serve
    engine.serve = lambda name, part, prompt, *rest: seen.append(prompt.token_ids) or serve(name, part, prompt, *rest)
    prove(engine, (7, 9), 1000, 16)
    return seen[0]


PROMPT = Prompt(
    (1, 2, 7, 9, 3, 4, 5),
    (
        PromptSegment("document", "a", 0, 2),
        PromptSegment("separator", "s", 2, 4),
        PromptSegment("document", "b", 4, 6),
        PromptSegment("query", "q", 6, 7),
    ),
)


def chunking():
    return Chunking((7, 9), 16, ByteTokenizer())


def record(*ranges):
    return Record("r", "request", "own", chunks=tuple(Chunk(*each, "key", False, False) for each in ranges))


def test_the_traces_own_separators_are_let_through_and_others_refused():
    chunking().check("r", PROMPT)
    with pytest.raises(EngineError, match=r"separators of the token ids \[7, 9\] .* splits at \[9\]") as raised:
        Chunking((9,), 16, ByteTokenizer()).check("r", PROMPT)
    assert raised.value.hint.startswith("give --option separator=")


@pytest.mark.parametrize(
    ("ranges", "told"),
    [
        ([(0, 2), (4, 7)], "takes several segments for one chunk"),
        ([(0, 7)], "takes several segments for one chunk"),
        ([(0, 1), (1, 2), (4, 6), (6, 7)], "splits inside a segment"),
        ([(0, 3), (4, 6), (6, 7)], "takes what stands between segments into its chunks"),
    ],
)
def test_chunks_that_are_not_the_traces_segments_are_told_once(ranges, told, capsys):
    looked_at = chunking()
    looked_at.compare("r", PROMPT, record(*ranges))
    looked_at.compare("r", PROMPT, record(*ranges))
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert ("--separator" in line) == ("several" in told)


def test_chunks_that_are_the_traces_segments_are_not_worth_a_word(capsys):
    chunking().compare("r", PROMPT, record((0, 2), (4, 6), (6, 7), (7, 7)))
    chunking().compare("r", PROMPT, record())
    assert capsys.readouterr().err == ""


def test_a_warning_of_lmcaches_is_told_once_whatever_figures_stand_in_it(capsys):
    running = SimpleNamespace(rpc=lambda method: {})
    engine = LmcacheEngine(running, SimpleNamespace(), EngineSettings(), chunking(), {})
    engine._tell(["LMCache: took 3 s for 0x7f1a", "LMCache: took 5 s for 0x7bb2 (2 times)"])
    engine._tell(["LMCache: took 9 s for 0x7f1a", "LMCache: something else"])
    assert "took 3 s" in (lines := capsys.readouterr().err.splitlines())[0]
    assert "something else" in lines[-1]
    assert len(lines) == 2


@pytest.mark.parametrize("policy", [None, LmcacheDefault()])
def test_a_full_prefill_out_of_vllms_own_cache_is_an_error(policy, monkeypatch):
    running = SimpleNamespace(rpc=lambda method, *_: {} if method == "kvaudit_health" else RECORD.packed())
    place = SimpleNamespace(tokenizer=ByteTokenizer(), end_ids=frozenset())
    answered = SimpleNamespace(asked=SimpleNamespace(cached_tokens=48, ttft_ms=1.0, total_ms=2.0), answer=None)
    monkeypatch.setattr(lmcache, "answer", lambda *_: answered)
    monkeypatch.setattr(Job, "packed", lambda job: b"")
    engine = LmcacheEngine(running, place, EngineSettings(), chunking(), {})
    if policy is not None:
        assert engine.serve("r", "request", PROMPT, Sampling(0), policy).reused_tokens == 0
        return
    with pytest.raises(EngineError, match="vLLM took 48 tokens of a full prefill from a cache"):
        engine.serve("r", "request", PROMPT, Sampling(0), policy)


@pytest.mark.parametrize(
    ("error", "hint"),
    [("LMCache: Local cpu memory under pressure so", "--cache-capacity"), ("LMCache: a thread died", "log in the run")],
)
def test_a_prompt_that_lmcache_did_not_store_or_serve_whole_is_an_error_with_what_to_do(error, hint):
    with pytest.raises(EngineError, match=error) as caught:
        lmcache._checked(replace(RECORD, errors=(error,)), None)
    assert hint in caught.value.hint


RECORD = Record("r", "request", "own")
