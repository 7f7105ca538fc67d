"""The embedded engine's semantics once more: slow, in float64, with loops and explicit lists of visible positions.

Written from the specification alone, without a look at the engine, so that the two can be held against each other.
It takes the weights and the rotary module of a transformers model and nothing of kvaudit's engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from slow_blend import Hidden, SlowAttention, SlowPass, SlowSignals, extend, looked_at
from slow_model import Mixed, SlowModel
from slow_prefix import Kept, longest_prefix
from slow_store import Key, SlowEntry, SlowStore
from slow_versions import overlap, weights_then

from kvaudit.engines import PREFIX_LOOKUPS, Switches
from kvaudit.policies import BudgetContext, Policy, SegmentView, SelectionContext, checked_selection
from kvaudit.records import GAP_KINDS, Part, Prompt, PromptSegment


@dataclass(frozen=True)
class SlowSelection:
    """`reusable` and (at the last layer) `selected` positions, ascending; `deviation`: float32 [N] over `reusable`, at
    the check layer; `layer` where the selection began, `recomputed` the mean over the layers from there on."""

    reusable: list[int]
    selected: list[int]
    deviation: np.ndarray
    layer: int = 0
    recomputed: float = 0.0


@dataclass(frozen=True)
class SlowResult:
    """What one serve did. logits: float64 [V]; keys (rotated) and values of the mixed cache: float64 [L, G, n, D].

    `usable`: per segment the entry that it was loaded from, or None; `cache`: the mixed cache before rotation.
    """

    logits: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    cache: Mixed
    selection: SlowSelection
    reused_tokens: int
    usable: tuple[SlowEntry | None, ...]
    written: tuple[SlowEntry, ...]
    evicted: tuple[SlowEntry, ...]


class SlowEngine:
    """`seed` seeds the policies' generators, by request, in a way of its own: not the engine's draws."""

    def __init__(self, hf_model: Any, switches: Switches, ratio: float, seed: int = 0) -> None:
        self.model = SlowModel(hf_model)
        self.switches, self.ratio, self.seed = switches, ratio, seed
        self.reset()

    def reset(self) -> None:
        self.store = SlowStore(self.switches.capacity_bytes, 5 if self.switches.write_back == "versions" else None)
        self.whole: set[int] = set()
        self.kept: list[Kept] = []

    def stored(self, entry: SlowEntry) -> torch.Tensor:
        """Keys and values of an entry [L, 2, G, len, D], keys as they are kept: raw, or turned if they never move."""
        keys = entry.keys
        if self.switches.keys == "unmoved":
            assert entry.places is not None
            each = zip(entry.keys, entry.places.tolist(), strict=True)
            keys = torch.stack([self.model.rotate(raw, places) for raw, places in each])
        return torch.stack([keys, entry.values], 1)

    @torch.no_grad()
    def serve(self, request_id: str, prompt: Prompt, policy: Policy | None, part: Part = "request") -> SlowResult:
        """Prefill one prompt and write back (without a policy: full prefill, the store untouched)."""
        if policy is not None and self.switches.lookup in PREFIX_LOOKUPS:
            return self._serve_over_prefix(prompt)
        writer = (request_id, part)
        stored_before = set(self.store.entries.values())
        written_before, evicted_before = len(self.store.written), len(self.store.evicted)
        usable = [None] * len(prompt.segments) if policy is None else self._look_up(prompt, writer)
        cache, selection = self._empty(len(prompt.token_ids)), SlowSelection([], [], np.empty(0, np.float32))
        sighted: list[Hidden] = [{} for _ in self.model.layers]
        if policy is None or not any(usable):
            hidden = self._extend(cache, prompt.token_ids, 0, sighted)
        else:
            end = self._blended_end(prompt, usable)
            cache, hidden, selection = self._blend(request_id, prompt, usable, end, cache, policy, sighted)
            if end < len(prompt.token_ids):
                hidden = self._extend(cache, prompt.token_ids, end, sighted)
        if policy is not None:
            saved = "written-attention" in policy.needs or self.switches.write_back == "versions"
            saving = sighted[self.switches.check_layer] if saved else None
            self._write_back(prompt, writer, cache, usable, saving)
        reused = [s.end - s.start for s, entry in zip(prompt.segments, usable, strict=True) if entry in stored_before]
        return SlowResult(
            self.model.logits(hidden),
            self._rotated(cache),
            cache.values,
            cache,
            selection,
            sum(reused),
            tuple(usable),
            tuple(self.store.written[written_before:]),
            tuple(self.store.evicted[evicted_before:]),
        )

    def _serve_over_prefix(self, prompt: Prompt) -> SlowResult:
        """Nothing but the longest prefix that an earlier prompt had is loaded; what it was written with is not told."""
        assert self.switches.capacity_bytes is None
        reused, earlier = longest_prefix(self.switches.lookup, prompt.token_ids, self.kept)
        cache = self._empty(len(prompt.token_ids))
        for layer in range(len(self.model.layers) if earlier is not None else 0):
            for position in range(reused):
                cache.put(layer, position, earlier.keys[layer, :, position], earlier.values[layer, :, position])
        logits = self.model.logits(self._extend(cache, prompt.token_ids, reused))
        if self.switches.write_back != "none":
            self.kept.append((prompt.token_ids, cache))
        nothing = SlowSelection([], [], np.empty(0, np.float32))
        unknown = (None,) * len(prompt.segments)
        return SlowResult(logits, self._rotated(cache), cache.values, cache, nothing, reused, unknown, (), ())

    @torch.no_grad()
    def greedy(self, prompt: Prompt, result: SlowResult, max_tokens: int, end_ids: Iterable[int] = ()) -> list[int]:
        """Generated ids, an end id included, over the mixed cache of a result, one token at a time."""
        generated: list[int] = []
        logits, end_ids, cache = result.logits, set(end_ids), result.cache
        while len(generated) < max_tokens:
            generated.append(int(torch.argmax(logits)))
            if generated[-1] in end_ids:
                break
            ids, cache = [*prompt.token_ids, *generated], cache.grown()
            logits = self.model.logits(self._extend(cache, ids, len(ids) - 1))
        return generated

    @torch.no_grad()
    def forced(self, prompt: Prompt, result: SlowResult, answer: Sequence[int]) -> torch.Tensor:
        """Logits float64 [T, V] for each of the T tokens of a given answer, over the mixed cache of a result."""
        logits, cache = [result.logits], result.cache
        for count in range(1, len(answer)):
            ids, cache = [*prompt.token_ids, *answer[:count]], cache.grown()
            logits.append(self.model.logits(self._extend(cache, ids, len(ids) - 1)))
        return torch.stack(logits)

    def _look_up(self, prompt: Prompt, writer: tuple[str, Part]) -> list[SlowEntry | None]:
        """Step 1: the usable entry of each segment."""
        write_back = self.switches.write_back
        usable: list[SlowEntry | None] = [None] * len(prompt.segments)
        missed, leading_run = False, True
        self.whole = set()
        for index, segment in enumerate(prompt.segments):
            if self._is_gap(segment):
                leading_run = False
                continue
            key = self._key(prompt, segment)
            if write_back == "isolated":
                if segment.kind != "query":
                    usable[index] = self.store.find(key) or self._computed_alone(prompt, segment, key, writer)
                continue
            leading_only = write_back == "versioned" and (
                self.switches.mask == "bottom-right" or self.switches.gap == "zero"
            )
            stopped = self.switches.lookup == "stop-at-miss" and missed
            if write_back == "versions":
                usable[index] = None if stopped else self._best_version(prompt, index)
            elif not stopped and (leading_run or not leading_only):
                usable[index] = self.store.find(key)
            if usable[index] is None:
                missed, leading_run = True, False
        return usable

    def _best_version(self, prompt: Prompt, index: int) -> SlowEntry | None:
        now = [before.content_id for before in prompt.segments[:index] if before.kind not in GAP_KINDS]
        ids, context = self._key(prompt, prompt.segments[index])
        ranked = []
        for key, entry in self.store.entries.items():
            if key[0] == ids:
                then = list(zip(entry.over, entry.tokens_over, strict=True))
                score = overlap(weights_then(then, entry.attention and entry.attention.over), now)
                ranked.append((score, entry.context == context, -entry.write_ordinal, key))
        if not ranked:
            return None
        best = max(ranked)
        if best[0] == 1:
            self.whole.add(index)
        return self.store.find(best[-1])

    def _computed_alone(self, prompt: Prompt, segment: PromptSegment, key: Key, writer: tuple[str, Part]) -> SlowEntry:
        ids = prompt.token_ids[segment.start : segment.end]
        cache = self._empty(len(ids))
        self._extend(cache, ids, 0)
        alone = SlowAttention([0.0] * len(ids), {}, float(len(ids)))
        entry = SlowEntry(
            ids, cache.keys, cache.values, 0, *writer, (), (), segment.content_id, (), alone, (), cache.places
        )
        self.store.write(key, entry)
        return entry

    def _blended_end(self, prompt: Prompt, usable: Sequence[SlowEntry | None]) -> int:
        """Step 3: E."""
        if self.switches.suffix == "with-rows":
            return len(prompt.token_ids)
        return min(len(prompt.token_ids) - 1, _last_usable_end(prompt, usable))

    def _blend(
        self,
        request_id: str,
        prompt: Prompt,
        usable: Sequence[SlowEntry | None],
        end: int,
        cache: Mixed,
        policy: Policy,
        sighted: list[Hidden],
    ) -> tuple[Mixed, torch.Tensor | None, SlowSelection]:
        """Steps 3 to 6 over [0, end): the filled cache, the hidden state of its last row, the selection."""
        loaded, zeroed = self._load(prompt, usable, end, cache)
        start = 0 if policy.start == "first-layer" else self.switches.check_layer
        attentions = [entry and entry.attention for entry in usable]
        run = SlowPass(self.model, self.switches, prompt, end, loaded, zeroed, cache, attentions, start, sighted)
        segments = [self._view(prompt, index, entry) for index, entry in enumerate(usable)]
        positions = np.array(run.reusable, dtype=np.int64)
        k = policy.budget(BudgetContext(len(positions), self.ratio, segments, positions))
        layers = len(self.model.layers) - start
        rng = np.random.default_rng([self.seed, *request_id.encode()])

        def choose(signals: SlowSignals, count: int) -> list[int]:
            context = SelectionContext(
                policy=policy.name,
                request_id=request_id,
                layer=signals.layer,
                layers=len(self.model.layers),
                k=count,
                positions=np.array(signals.left, dtype=np.int64),
                token_ids=np.array(prompt.token_ids),
                segments=segments,
                rng=rng,
                needs=policy.needs,
                signals=signals,
            )
            return checked_selection(policy, context).tolist()

        selections = run.run((policy.schedule(k, len(positions), layers) if k else None) or [k] * layers, choose)
        recomputed = sum(map(len, selections)) / layers
        selection = SlowSelection(run.reusable, selections[-1], run.recorded_deviation(), start, recomputed)
        return run.cache, run.last, selection

    def _view(self, prompt: Prompt, index: int, entry: SlowEntry | None) -> SegmentView:
        segment = prompt.segments[index]
        return SegmentView(segment.kind, segment.content_id, segment.start, segment.end, entry is not None)

    def _load(
        self, prompt: Prompt, usable: Sequence[SlowEntry | None], end: int, cache: Mixed
    ) -> tuple[set[int], set[int]]:
        """Step 3: loaded and zeroed positions of [0, end); the cache (which begins as zeros) gets what is loaded."""
        loaded, zeroed = set(), set()
        for segment, entry in zip(prompt.segments, usable, strict=True):
            for position in range(segment.start, min(segment.end, end)):
                if entry is not None:
                    loaded.add(position)
                    offset = position - segment.start
                    for layer in range(len(self.model.layers)):
                        key, value = entry.keys[layer, :, offset], entry.values[layer, :, offset]
                        stays = self.switches.keys == "unmoved" and entry.places is not None
                        cache.put(layer, position, key, value, int(entry.places[layer, offset]) if stays else None)
                elif (
                    self.switches.gap == "zero"
                    and self._is_gap(segment)
                    and segment.end <= _last_usable_end(prompt, usable)
                ):
                    zeroed.add(position)
        return loaded, zeroed

    def _extend(
        self, cache: Mixed, token_ids: Sequence[int], start: int, sighted: list[Hidden] | None = None
    ) -> torch.Tensor:
        """Tokens [start, n) with an exact mask over the cache before them (steps 2, 7, 8); the last hidden state."""
        return extend(self.model, cache, token_ids, start, sighted)

    def _write_back(
        self,
        prompt: Prompt,
        writer: tuple[str, Part],
        cache: Mixed,
        usable: Sequence[SlowEntry | None],
        saving: Hidden | None,
    ) -> None:
        """Step 9. A chunk counts as not in the store when it is not there at its turn: a write before may evict it."""
        if self.switches.write_back in ("isolated", "none"):
            return
        for index, segment in enumerate(prompt.segments):
            key = self._key(prompt, segment)
            if self._is_gap(segment):
                continue
            if index in self.whole:
                continue
            if self.switches.write_back == "last-writer" or key not in self.store.entries:
                self.store.write(key, self._entry(prompt, index, writer, cache, usable, saving))

    def _entry(
        self,
        prompt: Prompt,
        index: int,
        writer: tuple[str, Part],
        cache: Mixed,
        usable: Sequence[SlowEntry | None],
        saving: Hidden | None,
    ) -> SlowEntry:
        segment, loaded = prompt.segments[index], usable[index]
        saved = (
            None if saving is None else looked_at(self.model, self.switches.check_layer, prompt, index, cache, saving)
        )
        return SlowEntry(
            prompt.token_ids[segment.start : segment.end],
            cache.keys[:, :, segment.start : segment.end].clone(),
            cache.values[:, :, segment.start : segment.end].clone(),
            segment.start,
            *writer,
            prompt.token_ids[: segment.start],
            tuple(before for before in usable[:index] if before is not None),
            segment.content_id,
            tuple(before.content_id for before in prompt.segments[:index] if before.kind not in GAP_KINDS),
            saved or (loaded.attention if loaded else None),
            tuple(before.end - before.start for before in prompt.segments[:index] if before.kind not in GAP_KINDS),
            cache.places[:, segment.start : segment.end].clone(),
        )

    def _key(self, prompt: Prompt, segment: PromptSegment) -> Key:
        by_context = self.switches.write_back in ("versioned", "versions")
        context = prompt.token_ids[: segment.start] if by_context else None
        return prompt.token_ids[segment.start : segment.end], context

    def _is_gap(self, segment: PromptSegment) -> bool:
        return self.switches.gap != "store" and segment.kind in GAP_KINDS

    def _empty(self, tokens: int) -> Mixed:
        return Mixed.zeros(len(self.model.layers), self.model.kv_heads, tokens, self.model.head_dim)

    def _rotated(self, cache: Mixed) -> torch.Tensor:
        tokens = range(cache.keys.shape[2])
        return torch.stack([self.model.turned(cache, layer, tokens) for layer in range(len(cache.keys))])


def _last_usable_end(prompt: Prompt, usable: Sequence[SlowEntry | None]) -> int:
    return max(segment.end for segment, entry in zip(prompt.segments, usable, strict=True) if entry is not None)
