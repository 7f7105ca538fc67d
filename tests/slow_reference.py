"""The embedded engine's semantics once more: slow, in float64, with loops and explicit lists of visible positions.

Written from the specification alone, without a look at the engine, so that the two can be held against each other.
It takes the weights and the rotary module of a transformers model and nothing of kvaudit's engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from policy_contexts import FixedSignals
from slow_model import Mixed, SlowModel

from kvaudit.engines import Switches
from kvaudit.policies import BudgetContext, Policy, SegmentView, SelectionContext, checked_selection
from kvaudit.records import GAP_KINDS, Part, Prompt, PromptSegment

FLOAT32_BYTES = 4
Key = tuple[tuple[int, ...], tuple[int, ...] | None]


@dataclass(eq=False)
class SlowEntry:
    """A stored chunk. keys (before rotation), values: float64 [L, G, len, D]; `context`: the ids before it."""

    token_ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    position: int
    writer_request_id: str
    writer_part: Part
    context: tuple[int, ...]
    computed_over: tuple[SlowEntry, ...]
    content_id: str
    write_ordinal: int = -1

    @property
    def size_bytes(self) -> int:
        return (self.keys.numel() + self.values.numel()) * FLOAT32_BYTES

    @property
    def ordinals_over(self) -> tuple[int, ...]:
        return tuple(entry.write_ordinal for entry in self.computed_over)


@dataclass
class SlowStore:
    """`entries` from the least to the most recently used; `written` and `evicted` are all of them so far."""

    capacity_bytes: int | None
    entries: dict[Key, SlowEntry] = field(default_factory=dict)
    written: list[SlowEntry] = field(default_factory=list)
    evicted: list[SlowEntry] = field(default_factory=list)

    def find(self, key: Key) -> SlowEntry | None:
        if key not in self.entries:
            return None
        self.entries[key] = self.entries.pop(key)
        return self.entries[key]

    def write(self, key: Key, entry: SlowEntry) -> None:
        if self.capacity_bytes is not None and entry.size_bytes > self.capacity_bytes:
            return
        self.entries.pop(key, None)
        entry.write_ordinal = len(self.written)
        self.written.append(entry)
        self.entries[key] = entry
        while self.capacity_bytes is not None and self.size_bytes > self.capacity_bytes:
            self.evicted.append(self.entries.pop(next(iter(self.entries))))

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())


@dataclass(frozen=True)
class SlowSelection:
    """`reusable` and `selected` positions, ascending; `deviation`: float32 [N] over `reusable`."""

    reusable: list[int]
    selected: list[int]
    deviation: np.ndarray


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
        self.store = SlowStore(switches.capacity_bytes)

    def reset(self) -> None:
        self.store = SlowStore(self.switches.capacity_bytes)

    @torch.no_grad()
    def serve(self, request_id: str, prompt: Prompt, policy: Policy | None, part: Part = "request") -> SlowResult:
        """Prefill one prompt and write back (without a policy: full prefill, the store untouched)."""
        writer = (request_id, part)
        stored_before = set(self.store.entries.values())
        written_before, evicted_before = len(self.store.written), len(self.store.evicted)
        usable = [None] * len(prompt.segments) if policy is None else self._look_up(prompt, writer)
        cache, selection = self._empty(len(prompt.token_ids)), SlowSelection([], [], np.empty(0, np.float32))
        if policy is None or not any(usable):
            hidden = self._extend(cache, prompt.token_ids, 0)
        else:
            end = self._blended_end(prompt, usable)
            hidden, selection = self._blend(request_id, prompt, usable, end, cache, policy)
            if end < len(prompt.token_ids):
                hidden = self._extend(cache, prompt.token_ids, end)
        if policy is not None:
            self._write_back(prompt, writer, cache, usable)
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
            if not stopped and (leading_run or not leading_only):
                usable[index] = self.store.find(key)
            if usable[index] is None:
                missed, leading_run = True, False
        return usable

    def _computed_alone(self, prompt: Prompt, segment: PromptSegment, key: Key, writer: tuple[str, Part]) -> SlowEntry:
        ids = prompt.token_ids[segment.start : segment.end]
        cache = self._empty(len(ids))
        self._extend(cache, ids, 0)
        entry = SlowEntry(ids, cache.keys, cache.values, 0, *writer, (), (), segment.content_id)
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
    ) -> tuple[torch.Tensor, SlowSelection]:
        """Steps 3 to 6 over [0, end): fills the cache there and returns the hidden state of the last row."""
        loaded, zeroed = self._load(prompt, usable, end, cache)
        hidden = self._fresh_layers(prompt, end, cache, zeroed)
        selection = self._select(request_id, prompt, usable, end, cache, hidden, (loaded, zeroed), policy)
        fresh = set(range(end)) - loaded - zeroed
        last = {end - 1} if end == len(prompt.token_ids) else set()
        rows = sorted(fresh | set(selection.selected) | last)
        for layer in range(self.switches.check_layer, len(self.model.layers)):
            for row in rows:
                cache.put(layer, row, *self.model.key_and_value(layer, hidden[row]))
            for j, row in enumerate(rows):
                newest = row if self.switches.mask == "exact" else end - len(rows) + j
                hidden[row] = self.model.block(layer, hidden[row], row, cache, range(newest + 1))
        return hidden[rows[-1]] if rows else torch.empty(0), selection

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
                        cache.put(layer, position, entry.keys[layer, :, offset], entry.values[layer, :, offset])
                elif (
                    self.switches.gap == "zero"
                    and self._is_gap(segment)
                    and segment.end <= _last_usable_end(prompt, usable)
                ):
                    zeroed.add(position)
        return loaded, zeroed

    def _fresh_layers(self, prompt: Prompt, end: int, cache: Mixed, zeroed: set[int]) -> list[torch.Tensor]:
        """Step 4: hidden states of [0, end) at the check layer; the cache gets the fresh layers below it."""
        hidden = [self.model.embed(token_id) for token_id in prompt.token_ids[:end]]
        fresh = self._empty(end)
        for layer in range(self.switches.check_layer):
            for position in range(end):
                fresh.put(layer, position, *self.model.key_and_value(layer, hidden[position]))
            hidden = [
                self.model.block(layer, hidden[position], position, fresh, range(position + 1))
                for position in range(end)
            ]
            for position in set(range(end)) - zeroed:
                cache.put(layer, position, fresh.keys[layer, :, position], fresh.values[layer, :, position])
        return hidden

    def _select(
        self,
        request_id: str,
        prompt: Prompt,
        usable: Sequence[SlowEntry | None],
        end: int,
        cache: Mixed,
        hidden: Sequence[torch.Tensor],
        reused: tuple[set[int], set[int]],
        policy: Policy,
    ) -> SlowSelection:
        """Step 5, at the check layer."""
        loaded, zeroed = reused
        domain = zeroed if self.switches.write_back == "versioned" else loaded | zeroed
        reusable = sorted(domain - {len(prompt.token_ids) - 1})
        layer = self.switches.check_layer
        differences: dict[str, list[torch.Tensor]] = {"key": [], "value": []}
        for position in reusable:
            key, value = self.model.key_and_value(layer, hidden[position])
            differences["key"].append(
                self.model.rotate(key[:, None], [position])
                - self.model.rotate(cache.keys[layer][:, [position]], [position])
            )
            differences["value"].append(value - cache.values[layer, :, position])
        distances = {
            name: np.array([float(difference.pow(2).sum()) for difference in each], dtype=np.float32)
            for name, each in differences.items()
        }
        segments = [
            SegmentView(s.kind, s.content_id, s.start, s.end, entry is not None)
            for s, entry in zip(prompt.segments, usable, strict=True)
        ]
        positions = np.array(reusable, dtype=np.int64)
        context = SelectionContext(
            policy=policy.name,
            request_id=request_id,
            layer=layer,
            layers=len(self.model.layers),
            k=policy.budget(BudgetContext(len(reusable), self.ratio, segments, positions)),
            positions=positions,
            token_ids=np.array(prompt.token_ids),
            segments=segments,
            rng=np.random.default_rng([self.seed, *request_id.encode()]),
            needs=policy.needs,
            signals=FixedSignals(distances[self.switches.deviation]),
        )
        selected = checked_selection(policy, context).tolist()
        return SlowSelection(reusable, selected, distances[self.switches.deviation])

    def _extend(self, cache: Mixed, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """Tokens [start, n) with an exact mask over the cache before them (steps 2, 7, 8); the last hidden state."""
        hidden = {position: self.model.embed(token_ids[position]) for position in range(start, len(token_ids))}
        for layer in range(len(self.model.layers)):
            for position in hidden:
                cache.put(layer, position, *self.model.key_and_value(layer, hidden[position]))
            for position in hidden:
                hidden[position] = self.model.block(layer, hidden[position], position, cache, range(position + 1))
        return hidden[len(token_ids) - 1]

    def _write_back(
        self, prompt: Prompt, writer: tuple[str, Part], cache: Mixed, usable: Sequence[SlowEntry | None]
    ) -> None:
        """Step 9. A chunk counts as not in the store when it is not there at its turn: a write before may evict it."""
        if self.switches.write_back in ("isolated", "none"):
            return
        for index, segment in enumerate(prompt.segments):
            key = self._key(prompt, segment)
            if self._is_gap(segment):
                continue
            if self.switches.write_back == "last-writer" or key not in self.store.entries:
                self.store.write(key, self._entry(prompt, index, writer, cache, usable))

    def _entry(
        self, prompt: Prompt, index: int, writer: tuple[str, Part], cache: Mixed, usable: Sequence[SlowEntry | None]
    ) -> SlowEntry:
        segment = prompt.segments[index]
        return SlowEntry(
            prompt.token_ids[segment.start : segment.end],
            cache.keys[:, :, segment.start : segment.end].clone(),
            cache.values[:, :, segment.start : segment.end].clone(),
            segment.start,
            *writer,
            prompt.token_ids[: segment.start],
            tuple(before for before in usable[:index] if before is not None),
            segment.content_id,
        )

    def _key(self, prompt: Prompt, segment: PromptSegment) -> Key:
        context = prompt.token_ids[: segment.start] if self.switches.write_back == "versioned" else None
        return prompt.token_ids[segment.start : segment.end], context

    def _is_gap(self, segment: PromptSegment) -> bool:
        return self.switches.gap != "store" and segment.kind in GAP_KINDS

    def _empty(self, tokens: int) -> Mixed:
        return Mixed.zeros(len(self.model.layers), self.model.kv_heads, tokens, self.model.head_dim)

    def _rotated(self, cache: Mixed) -> torch.Tensor:
        return torch.stack([self.model.rotate(keys, range(keys.shape[1])) for keys in cache.keys])


def _last_usable_end(prompt: Prompt, usable: Sequence[SlowEntry | None]) -> int:
    return max(segment.end for segment, entry in zip(prompt.segments, usable, strict=True) if entry is not None)
