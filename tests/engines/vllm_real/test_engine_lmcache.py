"""The engine `lmcache` on real vLLM and real LMCache, held against the embedded engine with LMCache's switches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from real_prompts import arm, fixture_requests, references

from kvaudit.engines import PRESETS, EngineSettings, Probed
from kvaudit.engines.embedded import open_engine as open_embedded
from kvaudit.engines.vllm import open_lmcache
from kvaudit.engines.vllm.resetting import prove
from kvaudit.errors import EngineError, PolicyError
from kvaudit.policies import Policy
from kvaudit.policies.bounds import RecomputeAll, ReuseAll
from kvaudit.policies.lmcache_default import LmcacheDefault
from kvaudit.policies.rounding import watched
from kvaudit.policies.spans import DocumentAligned
from kvaudit.policies.tokens import TokenTopK
from kvaudit.records import CacheState, Prompt, PromptSegment, Sampling

pytestmark = [pytest.mark.real, pytest.mark.model]

REQUESTS = 6


@pytest.fixture(scope="module")
def engine():
    opened = open_lmcache(EngineSettings(options={"max-model-len": "1024"}))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def requests(engine):
    return fixture_requests(engine, REQUESTS)


@pytest.fixture(scope="module")
def full(engine, requests):
    return references(engine, requests)


@pytest.fixture(scope="module")
def by_default(engine, requests, full):
    return arm(engine, requests, LmcacheDefault(), full)


@pytest.fixture(scope="module")
def embedded():
    return open_embedded(EngineSettings(switches=PRESETS["lmcache"]))


def positions(served):
    return [position for span in served.selection.spans for position in range(*span)]


def figures(served):
    return [(s.answer_ids, s.finish_reason, s.reused_tokens, s.reusable_tokens, s.budget_k) for s in served]


def test_full_prefill_answers_as_the_embedded_engine_does(engine, embedded, requests, full):
    expected = references(embedded, requests)
    for asked in requests:
        mine, other = full[asked.request_id], expected[asked.request_id]
        assert mine.generated_ids == other.generated_ids
        assert engine.tokenizer.digest == embedded.tokenizer.digest
        for row, (ids, logprobs) in enumerate(zip(mine.top_ids, mine.top_logprobs, strict=True)):
            known = dict(zip(other.top_ids[row].tolist(), other.top_logprobs[row].tolist(), strict=True))
            likely = [(p, known[i]) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True) if i in known][:20]
            np.testing.assert_allclose(*zip(*likely, strict=True), atol=2e-3)


def test_the_embedded_engine_with_lmcaches_switches_does_what_lmcache_does(embedded, requests, full, by_default):
    expected = arm(embedded, requests, TokenTopK(), references(embedded, requests))
    for mine, other in zip(by_default, expected, strict=True):
        assert (mine.reused_tokens, mine.reusable_tokens, mine.budget_k) == (
            other.reused_tokens,
            other.reusable_tokens,
            other.budget_k,
        )
        assert mine.recomputed_tokens == mine.budget_k > 0
        assert mine.selection.layer == other.selection.layer == 1
        np.testing.assert_allclose(mine.selection.total_deviation, other.selection.total_deviation, rtol=1e-4)
        assert positions(mine) == positions(other)
        np.testing.assert_allclose(mine.selection.deviation, other.selection.deviation, rtol=1e-3, atol=1e-4)
        assert mine.provenance == other.provenance
        assert [replace(w, size_bytes=0) for w in mine.writes] == [replace(w, size_bytes=0) for w in other.writes]
        assert mine.answer_ids == other.answer_ids
        if mine.kl is not None:
            assert mine.kl == pytest.approx(other.kl, abs=2e-3)
            assert mine.reference_logprob == pytest.approx(other.reference_logprob, abs=2e-2)
        assert mine.margin == pytest.approx(other.margin, abs=2e-2)


def test_token_topk_inside_lmcblender_is_lmcaches_own_selection(engine, requests, full, by_default):
    hooked = arm(engine, requests, TokenTopK(), full)
    assert figures(hooked) == figures(by_default)
    assert [s.selection for s in hooked] == [s.selection for s in by_default]
    assert [(s.kl, s.margin) for s in hooked] == [(s.kl, s.margin) for s in by_default]


def test_a_policy_selects_in_lmcaches_place(engine, requests, full, by_default):
    spans = arm(engine, requests, DocumentAligned(), full)
    assert [s.recomputed_tokens for s in spans] == [s.budget_k for s in spans]
    assert max(len(s.selection.spans) for s in spans) < min(len(s.selection.spans) for s in by_default)


def test_reuse_as_it_is_recomputes_nothing_and_all_recomputes_everything(engine, requests, full):
    nothing = arm(engine, requests[:2], ReuseAll(), full)
    assert [(s.budget_k, s.recomputed_tokens, s.selection.spans) for s in nothing] == [(0, 0, ())] * 2
    everything = arm(engine, requests[:2], RecomputeAll(), full)
    assert all(s.recomputed_tokens == s.reusable_tokens > 200 for s in everything)


def test_history_changes_what_is_reused_and_a_fresh_start_brings_it_back(engine, requests, full, by_default):
    assert figures(arm(engine, requests, LmcacheDefault(), full)) == figures(by_default)
    reversed_order = arm(engine, requests[::-1], LmcacheDefault(), full)[::-1]
    assert [s.selection for s in reversed_order] != [s.selection for s in by_default]
    assert any(
        p.writer_request_id != asked.request_id
        for asked, s in zip(requests, by_default, strict=True)
        for p in s.provenance
    )


def test_full_prefill_neither_reads_nor_writes_the_cache(engine, requests, full):
    policy, asked = LmcacheDefault(), requests[0]
    engine.reset()
    served = engine.serve("full", "request", asked.prompt, asked.sampling, None)
    assert engine.serve("cold", "request", asked.prompt, asked.sampling, policy).reused_tokens == 0
    again = engine.serve("full-2", "request", asked.prompt, asked.sampling, None, served.reference)
    assert (again.reused_tokens, again.writes, again.kl) == (0, (), 0.0)
    assert again.reference_logprob == pytest.approx(sum(row[0] for row in served.reference.top_logprobs))


def test_a_reset_that_clears_nothing_is_caught(engine, monkeypatch):
    """What `reset_prefix_cache(reset_connector=True)` says of itself is that it worked."""
    said = []

    def as_vllm_offers_it():
        said.append(engine._running._llm.reset_prefix_cache(reset_connector=True))
        return CacheState(None, None)

    separator, vocabulary = engine.chunk_rules.separator_ids, engine.capabilities.vocabulary_size
    prove(engine, separator, vocabulary, 16)
    engine.reset()
    with monkeypatch.context() as lying:
        lying.setattr(engine, "reset", as_vllm_offers_it)
        with pytest.raises(EngineError, match=r"reset left .* tokens"):
            prove(engine, separator, vocabulary, 16)
    assert said
    assert all(said)
    prove(engine, separator, vocabulary, 16)


def test_what_is_in_force_is_told(engine):
    told = engine.describe()
    assert told["lmcache_environment"]["LMCACHE_CHUNK_SIZE"] == "16"
    assert told["lmcache_environment"]["PYTHONHASHSEED"].isdecimal()
    assert told["lmcache_settings"]["backends"] == ["LocalCPUBackend"]


def test_rows_show_what_is_attended_to(engine, embedded, requests):
    assert isinstance(engine, Probed)
    at = np.array([0, 5, 40, 41, 300], dtype=np.int64)
    for one in (engine, embedded):
        one.reset()
    shown = [one.rows("rows", requests[0].prompt, LmcacheDefault(), at) for one in (engine, embedded)]
    assert shown[0].keys.shape == shown[1].keys.shape == (30, 5, 3, 64)
    np.testing.assert_allclose(shown[0].keys, shown[1].keys, atol=5e-2)
    np.testing.assert_allclose(shown[0].values, shown[1].values, atol=5e-2)


def test_separators_that_lmcache_would_not_find_are_refused_with_the_option_that_helps(engine, requests):
    separator = PromptSegment("separator", "s", 2, 4)
    prompt = Prompt(
        (5, 6, 198, 198, 9), (PromptSegment("document", "a", 0, 2), separator, PromptSegment("query", "b", 4, 5))
    )
    with pytest.raises(EngineError, match=r"separators of the token ids \[198, 198\].*--option separator="):
        engine.serve("other", "request", prompt, Sampling(1), None)


class Broken(Policy):
    name = "broken"
    needs = frozenset()

    def select(self, context):
        return context.positions[:0]


def test_a_policy_that_breaks_its_contract_is_named_and_the_engine_lives_on(engine, requests, full):
    asked = requests[0]
    engine.reset()
    engine.serve("first", "request", asked.prompt, asked.sampling, LmcacheDefault())
    with pytest.raises(PolicyError, match="policy 'broken' returned 0 positions, not k"):
        engine.serve("second", "request", asked.prompt, asked.sampling, Broken())
    assert engine.serve("third", "request", asked.prompt, asked.sampling, LmcacheDefault()).reused_tokens > 200


@pytest.mark.parametrize("policy", [TokenTopK(), LmcacheDefault()], ids=lambda policy: policy.name)
def test_what_a_watched_policy_noticed_comes_back(engine, requests, policy):
    asked, policy = requests[0], watched(policy, follow=False)
    engine.reset()
    engine.serve("first", "request", asked.prompt, asked.sampling, policy)
    engine.serve(
        "second", "request", asked.prompt, asked.sampling, policy
    )  # all but the gaps is right: rounding ranks it
    assert policy.decided > 0
