"""A fake engine with faults that can be planted, so that an audit's verdict can be held against the truth.

It has a small chunk cache with real hits, evictions and a ledger; policies choose from it as from any other. Answers
are a hash of the prompt, and, with a fault, of the very thing that the fault lets in. A call that an audit has no
reason to make raises.

Options (`--option NAME=VALUE`): `fault` (below), `only-policy` (the fault acts under this policy alone), `at` (the
request id at which `crash` strikes), `delay-ms` (time that a serve takes), `context` (the longest prompt and answer),
`figures=none` (report neither times nor what is in the cache, as a bare server would).
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np

from kvaudit.engines import Capabilities, EngineSettings
from kvaudit.errors import UsageError
from kvaudit.policies import Policy, SegmentView, SelectionContext, checked_selection
from kvaudit.records import (
    GAP_KINDS,
    CacheState,
    Eviction,
    Part,
    Prompt,
    PromptSegment,
    Provenance,
    Reference,
    Sampling,
    Selection,
    Served,
    runs,
)

FAULTS: Mapping[str, str] = {
    "none": "no fault: every answer is that of full prefill",
    "previous-request": "an answer depends on the request before it",
    "earlier-requests": "an answer depends on every request before it",
    "position": "an answer depends on how many requests came before it",
    "eviction": "an answer depends on which of its chunks were evicted before",
    "stale-cache": "a reset does not empty the cache, and the engine says so",
    "hidden-stale-cache": "a reset does not empty the cache, and the engine says that it did",
    "random": "every answer is random, full prefill's too",
    "random-reuse": "an answer is random when a policy is in force",
    "no-reuse": "nothing is ever written to the cache",
    "crash": "the engine fails at the request named by `at`",
}
_OPTIONS = frozenset({"fault", "only-policy", "at", "delay-ms", "context", "figures"})
_BOS = 256
_BYTES_A_TOKEN = 1024
_LAYER = 1


class ByteTokenizer:
    """Token ids are UTF-8 bytes, after a begin token."""

    digest = sha256(b"utf-8 bytes, 256 begins").hexdigest()
    leading_ids = (_BOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != _BOS).decode(errors="replace")

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces: list[tuple[int | None, str]] = []
        for index, (role, content) in enumerate(messages):
            pieces += [(None, f"<{role}>"), (index, content)]
        return [*pieces, (None, "<assistant>")]


@dataclass(frozen=True, slots=True)
class _Entry:
    content_id: str
    writer_request_id: str
    writer_part: Part
    ordinal: int
    position: int
    context_hash: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Reuse:
    reused: int = 0
    reusable: int = 0
    recomputed: int = 0
    selection: Selection | None = None
    provenance: tuple[Provenance, ...] = ()
    evictions: tuple[Eviction, ...] = ()


class ScriptedEngine:
    def __init__(self, settings: EngineSettings) -> None:
        options = settings.options
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise UsageError(f"engine 'scripted' has no option {unknown[0]!r}", f"known: {', '.join(sorted(_OPTIONS))}")
        self._fault = options.get("fault", "none")
        if self._fault not in FAULTS:
            raise UsageError(f"engine 'scripted' has no fault {self._fault!r}", f"known: {', '.join(FAULTS)}")
        self._settings = settings
        self._delay = float(options.get("delay-ms", "0")) / 1000
        self._silent = options.get("figures") == "none"
        self._cache: OrderedDict[str, _Entry] = OrderedDict()
        self._evicted: set[str] = set()
        self._served: list[str] | None = None
        self._writes = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        context = self._settings.options.get("context")
        return Capabilities(
            policies=True,
            provenance=True,
            reference_logprobs=not self._silent,
            max_prompt_tokens=int(context) if context else None,
            vocabulary_size=_BOS + 1,
        )

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def describe(self) -> Mapping[str, object]:
        return {"model": "scripted", "fault": self._fault, "switches": asdict(self._settings.switches)}

    def reset(self) -> CacheState:
        self._expect(not self._closed, "a reset after close")
        if not self._fault.endswith("stale-cache"):
            self._cache.clear()
        self._evicted.clear()
        self._served = []
        if self._silent:
            return CacheState(None, None)
        admitted = [] if self._fault == "hidden-stale-cache" else list(self._cache.values())
        return CacheState(len(admitted), sum(entry.size_bytes for entry in admitted))

    def close(self) -> None:
        self._expect(not self._closed, "a second close")
        self._closed = True

    def serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None = None,
    ) -> Served:
        served = self._expected_call(request_id, part, prompt, sampling, policy, reference)
        if self._fault == "crash" and request_id == self._settings.options.get("at"):
            raise RuntimeError("the planted crash")
        time.sleep(self._delay)
        answer = "" if part == "prelude" else self._answer(prompt, sampling, policy, served)
        reuse = _Reuse() if policy is None else self._reuse(request_id, part, prompt, policy)
        if part == "request":
            served.append(request_id)
        ids = tuple(answer.encode())
        first_ms = 1 + (len(prompt.token_ids) - reuse.reused + reuse.recomputed) / 100
        held = reference is not None and not self._silent
        shown = policy is None and reference is None and not self._silent
        return Served(
            answer_ids=ids,
            answer_text=answer,
            finish_reason="length" if len(ids) == sampling.max_tokens else "stop",
            prompt_tokens=len(prompt.token_ids),
            ttft_ms=None if self._silent else first_ms,
            total_ms=None if self._silent else first_ms + len(ids) / 10,
            reused_tokens=reuse.reused,
            reusable_tokens=reuse.reusable,
            recomputed_tokens=reuse.recomputed,
            budget_k=reuse.recomputed,
            selection=reuse.selection,
            provenance=reuse.provenance,
            evictions=reuse.evictions,
            kl=float(reference is not None and ids != tuple(reference.generated_ids)) if held else None,
            reference_logprob=-0.1 * len(ids) if held else None,
            margin=2.0 if held else None,
            reference=Reference(ids, [(token, _BOS) for token in ids], [(-0.1, -3.0) for _ in ids]) if shown else None,
        )

    def _answer(self, prompt: Prompt, sampling: Sampling, policy: Policy | None, served: list[str]) -> str:
        let_in = self._let_in(prompt, policy, served)
        text = sha256(repr((prompt.token_ids, let_in)).encode()).hexdigest()[: sampling.max_tokens]
        return min((text.partition(stop)[0] for stop in sampling.stop), key=len, default=text)

    def _let_in(self, prompt: Prompt, policy: Policy | None, served: list[str]) -> object:
        """What the fault lets into an answer; None is the answer of full prefill."""
        if self._fault == "random":
            return secrets.token_hex()
        if policy is None or self._settings.options.get("only-policy", policy.name) != policy.name:
            return None
        chunks = [segment.content_id for segment in _chunks(prompt)]
        match self._fault:
            case "previous-request":
                return served[-1] if served else None
            case "earlier-requests":
                return sorted(served) or None
            case "position":
                return len(served) or None
            case "eviction":
                return [chunk for chunk in chunks if chunk in self._evicted] or None
            case "stale-cache" | "hidden-stale-cache":
                return [self._cache[chunk].ordinal for chunk in chunks if chunk in self._cache] or None
            case "random-reuse":
                return secrets.token_hex()
        return None

    def _reuse(self, request_id: str, part: Part, prompt: Prompt, policy: Policy) -> _Reuse:
        hits = [index for index, segment in enumerate(prompt.segments) if self._usable(segment)]
        context = self._selection_context(request_id, prompt, policy, frozenset(hits))
        return _Reuse(
            reused=sum(prompt.segments[index].end - prompt.segments[index].start for index in hits),
            reusable=len(context.positions),
            recomputed=context.k,
            selection=_selection(policy, context),
            provenance=tuple(self._provenance(index, prompt) for index in hits),
            evictions=self._write_back(request_id, part, prompt, hits),
        )

    def _usable(self, segment: PromptSegment) -> bool:
        return segment.kind not in GAP_KINDS and segment.content_id in self._cache

    def _provenance(self, index: int, prompt: Prompt) -> Provenance:
        segment = prompt.segments[index]
        entry = self._cache[segment.content_id]
        return Provenance(
            segment=index,
            content_id=entry.content_id,
            writer_request_id=entry.writer_request_id,
            writer_part=entry.writer_part,
            write_ordinal=entry.ordinal,
            old_position=entry.position,
            new_position=segment.start,
            context_hash_written=entry.context_hash,
            context_hash_now=_context_hash(prompt, segment),
        )

    def _selection_context(
        self, request_id: str, prompt: Prompt, policy: Policy, hits: frozenset[int]
    ) -> SelectionContext:
        last = len(prompt.token_ids) - 1
        reusable = [range(part.start, min(part.end, last)) for i, part in enumerate(prompt.segments) if i in hits]
        positions = np.array([position for span in reusable for position in span], dtype=np.int64)
        token_ids = np.array(prompt.token_ids, dtype=np.int64)
        deviation = (1 + (token_ids[positions] * 31 + positions * 17) % 97).astype(np.float32)
        seed = int.from_bytes(sha256(request_id.encode()).digest()[:8], "little")
        return SelectionContext(
            request_id=request_id,
            layer=_LAYER,
            k=policy.budget(len(positions), self._settings.recompute_ratio),
            positions=positions,
            deviation=deviation,
            token_ids=token_ids,
            segments=[
                SegmentView(part.kind, part.content_id, part.start, part.end, i in hits)
                for i, part in enumerate(prompt.segments)
            ],
            rng=np.random.default_rng([self._settings.seed, seed]),
            value_deviation=lambda: deviation,
            query_attention=lambda: deviation[None] / max(1.0, float(deviation.sum())),
        )

    def _write_back(self, request_id: str, part: Part, prompt: Prompt, hits: Sequence[int]) -> tuple[Eviction, ...]:
        for index in hits:
            self._cache.move_to_end(prompt.segments[index].content_id)
        evictions: list[Eviction] = []
        for segment in _chunks(prompt):
            if segment.content_id in self._cache or self._fault == "no-reuse":
                continue
            size = (segment.end - segment.start) * _BYTES_A_TOKEN
            self._writes += 1
            context = _context_hash(prompt, segment)
            self._cache[segment.content_id] = _Entry(
                segment.content_id, request_id, part, self._writes, segment.start, context, size
            )
            evictions += self._make_room()
        return tuple(evictions)

    def _make_room(self) -> list[Eviction]:
        capacity, evictions = self._settings.switches.capacity_bytes, list[Eviction]()
        while capacity is not None and sum(entry.size_bytes for entry in self._cache.values()) > capacity:
            _, entry = self._cache.popitem(last=False)
            self._evicted.add(entry.content_id)
            evictions.append(Eviction(entry.content_id, entry.ordinal, entry.size_bytes))
        return evictions

    def _expected_call(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None,
    ) -> list[str]:
        """The requests served since the reset, after a look at whether this call has a reason."""
        self._expect(not self._closed, "a serve after close")
        self._expect(self._served is not None, "a serve before the first reset")
        borders = [0, *(segment.end for segment in prompt.segments)]
        tiled = borders == [*(segment.start for segment in prompt.segments), len(prompt.token_ids)]
        self._expect(tiled and bool(prompt.segments), "segments that do not tile the prompt")
        self._expect((sampling.max_tokens == 0) == (part == "prelude"), f"{sampling.max_tokens} tokens for a {part}")
        self._expect(part == "request" or policy is not None, "a prelude of full prefill, which keeps no cache")
        self._expect(part == "request" or reference is None, "a prelude held against an answer")
        self._expect(part == "prelude" or policy is None or reference is not None, "a policy without a reference")
        served = self._served if self._served is not None else []
        self._expect(request_id not in served, f"request {request_id!r} twice since the reset")
        return served

    def _expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise RuntimeError(f"unexpected call: {otherwise}")


def open_engine(settings: EngineSettings) -> ScriptedEngine:
    return ScriptedEngine(settings)


def _chunks(prompt: Prompt) -> list[PromptSegment]:
    return [segment for segment in prompt.segments if segment.kind not in GAP_KINDS]


def _selection(policy: Policy, context: SelectionContext) -> Selection | None:
    if not len(context.positions):
        return None
    chosen = checked_selection(policy, context)
    deviation = dict(zip(context.positions.tolist(), context.deviation.tolist(), strict=True))
    spans = tuple(runs(chosen.tolist()))
    return Selection(
        layer=context.layer,
        spans=spans,
        deviation=tuple(sum(deviation[position] for position in range(*span)) for span in spans),
        total_deviation=float(context.deviation.sum(dtype=np.float64)),
    )


def _context_hash(prompt: Prompt, segment: PromptSegment) -> str:
    return sha256(repr(prompt.token_ids[: segment.start]).encode()).hexdigest()[:16]
