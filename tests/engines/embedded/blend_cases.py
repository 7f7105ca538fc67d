"""Prompts out of a small pool of chunks, and the engine and the slow reference side by side over them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from slow_reference import SlowEngine, SlowEntry, SlowResult
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.plugins import load
from kvaudit.policies import BudgetContext, Need, Policy, Positions, SelectionContext, checked_selection
from kvaudit.records import FULL_PREFILL, Eviction, Part, Prompt, PromptSegment, Sampling, Served, Write

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
"""What one token of a chunk takes in the cache: layers, keys and values, KV heads, head dim, float32."""

KINDS = {"i": "instruction", "d": "document", "s": "separator", "g": "glue", "q": "query", "m": "message"}
POOL = {
    "i0": (5, 6, 7),
    "d0": (40, 41, 42, 43),
    "d1": (50, 51, 52, 53, 54, 55),
    "d2": (60,),
    "d3": (70, 71, 72, 70, 71, 72, 73),
    "d4": (1, 2),
    "s0": (1, 2),
    "s1": (9,),
    "g0": (3,),
    "q0": (80, 81),
    "q1": (90, 91, 92, 93),
    "q2": (40, 41, 42, 43),
}
"""Chunks by kind and number. `d4` has the ids of a separator, `q2` those of a document."""


def prompt_of(words: str) -> Prompt:
    """A prompt of pool chunks: "i0 s0 d1 s0 d2 q0"."""
    ids: list[int] = []
    segments = []
    for word in words.split():
        content_id = hashlib.sha256(repr(POOL[word]).encode()).hexdigest()[:8]
        segments.append(PromptSegment(KINDS[word[0]], content_id, len(ids), len(ids) + len(POOL[word])))
        ids += POOL[word]
    return Prompt(tuple(ids), tuple(segments))


@dataclass(frozen=True)
class Every(Policy):
    """A policy without regard to deviation: every `step`-th reusable token from `first` on, then the earliest left."""

    first: int = 1
    step: int = 3
    name: str = "every"

    def budget(self, request: BudgetContext) -> int:
        return int(np.ceil(request.ratio * request.reusable))

    def select(self, context: SelectionContext) -> Positions:
        favoured = context.positions[self.first :: self.step]
        return np.concatenate([favoured, np.setdiff1d(context.positions, favoured)])[: context.k]


@dataclass(frozen=True)
class Replay(Policy):
    """The budget of `policy`, the selection that the engine made: what follows from a near tie is the same on both."""

    policy: Policy
    selected: np.ndarray
    name: str = "replay"
    needs = frozenset()

    def budget(self, request: BudgetContext) -> int:
        return self.policy.budget(request)

    def select(self, context: SelectionContext) -> Positions:
        return self.selected


@dataclass(frozen=True)
class Recorded(Policy):
    """`policy`, and the contexts in which it was asked."""

    policy: Policy
    contexts: list[SelectionContext] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def needs(self) -> frozenset[Need]:
        return self.policy.needs

    def budget(self, request: BudgetContext) -> int:
        return self.policy.budget(request)

    def select(self, context: SelectionContext) -> Positions:
        self.contexts.append(context)
        return self.policy.select(context)


def policy_named(name: str) -> Policy | None:
    if name == FULL_PREFILL:
        return None
    return Every() if name == "every" else load("policies", name)()


@cache
def model_of(family: str, seed: int = 1) -> Any:
    return tiny_model(family, seed)


@cache
def weights_for(family: str, seed: int = 1) -> Any:
    return weights_of(model_of(family, seed), torch.float32, torch.device("cpu"))


def engine_of(switches: Switches, ratio: float = 0.3, family: str = "llama", seed: int = 1) -> EmbeddedEngine:
    settings = EngineSettings(recompute_ratio=ratio, switches=switches, device="cpu", seed=0)
    return EmbeddedEngine(weights_for(family, seed), TinyTokenizer(), settings, {})


class Pair:
    """The engine and the slow reference over the same history; every serve compares all that both can show."""

    def __init__(self, switches: Switches, ratio: float = 0.3, family: str = "llama", seed: int = 1) -> None:
        self.engine = engine_of(switches, ratio, family, seed)
        self.slow = SlowEngine(model_of(family, seed), switches, ratio)
        self.hashes: dict[tuple[int, ...], str] = {}

    def prefill(
        self, request_id: str, prompt: Prompt, policy: Policy | None, part: Part = "request"
    ) -> tuple[Any, SlowResult]:
        recorded = policy and Recorded(policy)
        got = self.engine.prefill(request_id, part, prompt, recorded)
        slow = self.slow.serve(request_id, prompt, policy and Replay(policy, got.selected), part)
        assert got.hits == tuple(entry is not None for entry in slow.usable)
        assert got.reused_tokens == slow.reused_tokens
        assert got.reusable.tolist() == slow.selection.reusable
        assert got.selected.tolist() == slow.selection.selected
        np.testing.assert_allclose(got.deviation, slow.selection.deviation, **TOLERANCE)
        if recorded:
            self._compare_choice(got, recorded)
        torch.testing.assert_close(got.keys.double(), slow.keys, **TOLERANCE)
        torch.testing.assert_close(got.values.double(), slow.values, **TOLERANCE)
        torch.testing.assert_close(got.logits.double(), slow.logits, **TOLERANCE)
        self._compare_stores(slow, *self.engine.cache.take_journal())
        return got, slow

    def serve(
        self, request_id: str, prompt: Prompt, policy: Policy, max_tokens: int, part: Part = "request"
    ) -> tuple[Served, SlowResult]:
        """Through the engine's front door; for policies without regard to deviation."""
        got = self.engine.serve(request_id, part, prompt, Sampling(max_tokens), policy)
        slow = self.slow.serve(request_id, prompt, policy, part)
        assert (got.prompt_tokens, got.reused_tokens) == (len(prompt.token_ids), slow.reused_tokens)
        self._compare_stores(slow, got.writes, got.evictions)
        return got, slow

    def _compare_choice(self, got: Any, recorded: Recorded) -> None:
        """The selection is the policy's own over the deviation that the engine saw, itself compared already."""
        if not recorded.contexts:
            assert len(got.selected) == 0
            return
        (context,) = recorded.contexts
        assert context.positions.tolist() == got.reusable.tolist()
        assert np.array_equal(context.signals.deviation(), got.deviation)
        if recorded.name != "random-document":
            assert checked_selection(recorded.policy, context).tolist() == got.selected.tolist()

    def _compare_stores(self, slow: SlowResult, writes: Sequence[Write], evictions: Sequence[Eviction]) -> None:
        for write, twin in zip(writes, slow.written, strict=True):
            assert self.hashes.setdefault(twin.context, write.context_hash) == write.context_hash
            facts = (write.content_id, write.tokens, write.computed_over)
            assert facts == (twin.content_id, len(twin.token_ids), twin.ordinals_over)
            assert (write.write_ordinal, write.position, write.size_bytes) == _ledger(twin)
        assert len(set(self.hashes.values())) == len(self.hashes), "two contexts have the same hash"
        assert [(gone.content_id, gone.write_ordinal, gone.size_bytes) for gone in evictions] == [
            (gone.content_id, gone.write_ordinal, gone.size_bytes) for gone in slow.evicted
        ]
        for entry, twin in zip(self.engine.cache.entries(), self.slow.store.entries.values(), strict=True):
            assert entry.token_ids == twin.token_ids
            assert (entry.writer_request_id, entry.writer_part) == (twin.writer_request_id, twin.writer_part)
            assert (entry.write_ordinal, entry.position, entry.size_bytes) == _ledger(twin)
            assert (entry.context_hash, entry.computed_over) == (self.hashes[twin.context], twin.ordinals_over)
            torch.testing.assert_close(entry.states.double(), torch.stack([twin.keys, twin.values], 1), **TOLERANCE)


def _ledger(entry: SlowEntry) -> tuple[int, int, int]:
    return entry.write_ordinal, entry.position, entry.size_bytes


prompts = st.lists(st.sampled_from(list(POOL)), min_size=1, max_size=6).map(" ".join)
"""Any chunks in any arrangement: repeated, without a query, with gaps at the ends."""

rolling_prompts = st.builds(
    lambda separator, documents, query: f" {separator} ".join(["i0", *documents, query]),
    st.sampled_from(["s0", "s1 g0", "g0"]),
    st.lists(st.sampled_from(["d0", "d1", "d2", "d3"]), min_size=1, max_size=3),
    st.sampled_from(["q0", "q1"]),
)
"""An instruction, documents and a query with separators between them, as agents send them."""

histories = st.lists(
    st.tuples(prompts | rolling_prompts, st.sampled_from(["prelude", "request"])), min_size=2, max_size=5
)

every_switch = st.builds(
    Switches,
    mask=st.sampled_from(["exact", "bottom-right"]),
    gap=st.sampled_from(["recompute", "zero", "store"]),
    lookup=st.sampled_from(["any", "stop-at-miss"]),
    write_back=st.sampled_from(["first-writer", "last-writer", "isolated", "versioned", "none"]),
    suffix=st.sampled_from(["after", "with-rows"]),
    deviation=st.sampled_from(["key", "value"]),
    check_layer=st.integers(0, 2),
    capacity_bytes=st.none() | st.integers(2, 24).map(lambda tokens: tokens * TOKEN_BYTES),
)


def words_drawn(randomness: random.Random, count: int) -> list[str]:
    """`count` prompts for parametrised tests, rolling ones and arbitrary ones, with much in common."""
    drawn = []
    for _ in range(count):
        documents = randomness.sample(["d0", "d1", "d2", "d3"], randomness.randint(1, 3))
        separator = randomness.choice(["s0", "s0", "s1 g0"])
        rolling = f" {separator} ".join(["i0", *documents, randomness.choice(["q0", "q1"])])
        loose = " ".join(randomness.choices(list(POOL), k=randomness.randint(2, 6)))
        drawn.append(randomness.choice([rolling, rolling, loose]))
    return drawn
