"""Prompts out of a small pool of chunks, and the engine and the slow reference side by side over them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from slow_reference import SlowEngine, SlowResult
from slow_store import SlowEntry
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import PREFIX_LOOKUPS, EngineSettings, Lookup, Switches
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.plugins import BUILT_IN, load
from kvaudit.policies import BudgetContext, Need, Policy, Positions, SelectionContext, Start
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
class Drawn(Policy):
    """A policy that may need, start and narrow as it is told to, and ranks by deviation where it sees one."""

    needs: frozenset[Need] = frozenset()
    start: Start = "check-layer"
    narrowing: Sequence[int] = ()
    name: str = "drawn"

    def budget(self, request: BudgetContext) -> int:
        return int(np.ceil(request.ratio * request.reusable))

    def schedule(self, k: int, reusable: int, layers: int) -> Sequence[int] | None:
        """k at each layer, with `narrowing` moved from the last layers to the first, as far as there is room."""
        counts = [k] * layers
        for early, late in zip(range(layers), reversed(range(layers)), strict=True):
            if early < late and early < len(self.narrowing):
                moved = min(self.narrowing[early], reusable - counts[early], counts[late])
                counts[early], counts[late] = counts[early] + moved, counts[late] - moved
        return sorted(counts, reverse=True) if self.narrowing else None

    def select(self, context: SelectionContext) -> Positions:
        if "deviation" in self.needs:
            return context.positions[np.argsort(-context.deviation, kind="stable")[: context.k]]
        return Every().select(context)


class Wrapped(Policy):
    """Asks `policy` for all but the selection."""

    policy: Policy
    name: str

    @property
    def needs(self) -> frozenset[Need]:
        return self.policy.needs

    @property
    def start(self) -> Start:
        return self.policy.start

    def budget(self, request: BudgetContext) -> int:
        return self.policy.budget(request)

    def schedule(self, k: int, reusable: int, layers: int) -> Sequence[int] | None:
        return self.policy.schedule(k, reusable, layers)


@dataclass(frozen=True)
class Stage:
    """What a policy was asked at one layer, what it saw of the signals that it declares, and what it chose."""

    context: SelectionContext
    seen: dict[str, np.ndarray]
    chosen: np.ndarray


@dataclass(frozen=True)
class Recorded(Wrapped):
    """`policy`, and the stages at which it was asked."""

    policy: Policy
    stages: list[Stage] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.policy.name

    def select(self, context: SelectionContext) -> Positions:
        seen = signals_seen(context)
        self.stages.append(Stage(context, seen, np.sort(self.policy.select(context))))
        return self.stages[-1].chosen


@dataclass(frozen=True)
class Replay(Wrapped):
    """`policy` with the selections that the engine made, layer by layer: what follows from a near tie is the same on
    both. `seen` by layer is what the signals say here."""

    policy: Policy
    chosen: dict[int, np.ndarray]
    name: str = "replay"
    seen: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def select(self, context: SelectionContext) -> Positions:
        self.seen[context.layer] = signals_seen(context)
        return self.chosen[context.layer]


def signals_seen(context: SelectionContext) -> dict[str, np.ndarray]:
    """Every signal that the policy declares, at every layer at which it may ask."""
    seen, needs = {}, context.needs
    if "deviation" in needs:
        seen["deviation"] = context.deviation
    for layer in range(context.layer + 1):
        if "key-deviation" in needs:
            seen[f"key deviation at {layer}"] = context.key_deviation(layer)
        if "value-deviation" in needs:
            seen[f"value deviation at {layer}"] = context.value_deviation(layer)
    for layer in [context.layers - 1, *range(context.layers - 1)] if "query-attention" in needs else []:
        seen[f"query attention at {layer}"] = context.query_attention(layer)
    if "written-attention" in needs:
        written = context.written_attention()
        seen["outside"] = written.outside
        for index, chunk in enumerate(written.chunks):
            seen[f"chunk {index}"] = np.array([np.nan] if chunk is None else [chunk.inside, *chunk.over.values()])
            seen[f"before chunk {index}"] = np.array([] if chunk is None else list(chunk.over))
    if "output-kl" in needs:
        for positions in (context.positions[: context.k], context.positions[1::2]):
            seen[f"kl {positions}"] = np.array(context.output_kl(positions))
    return seen


POLICIES = [name for name in BUILT_IN["policies"] if name != "oracle"]
"""Every policy but the one that serves a request many times over."""


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
    engine = EmbeddedEngine(weights_for(family, seed), TinyTokenizer(), settings, {})
    engine.blender.auxiliary = looked_at
    return engine


def looked_at(prompt: Prompt, start: int, end: int) -> np.ndarray:
    """What stands for an auxiliary model of two heads: attention that follows from ids and rows alone."""
    ids = np.array(prompt.token_ids, dtype=np.float32)
    return np.stack([ids / 128, (ids * (end - start) + start) % 7 / 7])


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
        chosen = {stage.context.layer: stage.chosen for stage in recorded.stages} if recorded else {}
        replayed = policy and Replay(policy, chosen)
        slow = self.slow.serve(request_id, prompt, replayed, part)
        assert got.hits == tuple(entry is not None for entry in slow.usable)
        assert got.reused_tokens == slow.reused_tokens
        assert got.reusable.tolist() == slow.selection.reusable
        assert got.selected.tolist() == slow.selection.selected
        assert got.choice.recomputed == slow.selection.recomputed
        if slow.selection.reusable:
            assert got.choice.layer == slow.selection.layer
        np.testing.assert_allclose(got.deviation, slow.selection.deviation, **TOLERANCE)
        if recorded and replayed:
            self._compare_stages(prompt, got, recorded, replayed, slow)
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

    def _compare_stages(self, prompt: Prompt, got: Any, recorded: Recorded, replayed: Replay, slow: SlowResult) -> None:
        """What the policy saw is what the reference computes, and its last word is what was recomputed."""
        assert [stage.context.layer for stage in recorded.stages] == list(replayed.seen)
        for stage in recorded.stages:
            seen, expected = stage.seen, replayed.seen[stage.context.layer]
            assert seen.keys() == expected.keys()
            for name, values in expected.items():
                if values.dtype.kind == "U":
                    assert seen[name].tolist() == values.tolist(), name
                else:
                    assert seen[name].shape == values.shape, name
                    np.testing.assert_allclose(seen[name], values, **TOLERANCE, err_msg=name)
            self._compare_written(prompt, stage.context, slow)
        if recorded.stages:
            first, last = recorded.stages[0], recorded.stages[-1]
            assert first.context.positions.tolist() == got.reusable.tolist()
            assert set(got.selected.tolist()) <= set(last.chosen.tolist())
            if "deviation" in recorded.needs and first.context.layer == self.engine.blender.switches.check_layer:
                assert np.array_equal(first.seen["deviation"], got.deviation)

    def _compare_written(self, prompt: Prompt, context: SelectionContext, slow: SlowResult) -> None:
        for view, entry in zip(context.segments, slow.usable, strict=True):
            assert (view.written is not None) == view.hit == (entry is not None)
            if view.written is not None and entry is not None:
                written = view.written
                assert (written.request_id, written.part) == (entry.writer_request_id, entry.writer_part)
                assert (written.position, written.over) == (entry.position, entry.over)
                was_stored = entry.write_ordinal >= 0  # one that is larger than the whole cache is not
                assert not was_stored or written.ordinal == entry.write_ordinal
                same_context = prompt.token_ids[: view.start] == entry.context
                assert (written.context_hash == written.context_hash_now) == same_context

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
            torch.testing.assert_close(entry.states.double(), self.slow.stored(twin), **TOLERANCE)
            assert (entry.attention is None) == (twin.attention is None)
            if entry.attention is not None and twin.attention is not None:
                np.testing.assert_allclose(entry.attention.outside, twin.attention.outside, **TOLERANCE)
                assert entry.attention.chunk.inside == pytest.approx(twin.attention.inside, rel=1e-4, abs=1e-4)
                assert entry.attention.chunk.over == pytest.approx(twin.attention.over, rel=1e-4, abs=1e-4)


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

CHUNK_LOOKUPS = tuple(lookup for lookup in get_args(Lookup) if lookup not in PREFIX_LOOKUPS)
"""Lookups that find chunks wherever they stand."""

every_switch = st.builds(
    Switches,
    mask=st.sampled_from(["exact", "bottom-right"]),
    gap=st.sampled_from(["recompute", "zero", "store"]),
    lookup=st.sampled_from(CHUNK_LOOKUPS),
    write_back=st.sampled_from(["first-writer", "last-writer", "isolated", "versioned", "versions", "none"]),
    keys=st.sampled_from(["moved", "moved", "unmoved"]),
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
