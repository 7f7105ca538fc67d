"""The engine: a chunk cache with a ledger, and the faults."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256

import numpy as np

from kvaudit.engines import Capabilities, EngineSettings
from kvaudit.engines.scripted.signals import OFFERED, Signals
from kvaudit.engines.scripted.tokenizer import BOS, VOCABULARY, ByteTokenizer
from kvaudit.errors import UsageError
from kvaudit.policies import (
    BudgetContext,
    Policy,
    SegmentView,
    SelectionContext,
    checked_budget,
    checked_selection,
)
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
    Write,
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
    "rounding": "rounding, other at each place, decides which tokens are recomputed, and answers depend on them",
    "no-reuse": "nothing is ever written to the cache",
    "crash": "the engine fails at the request named by `at`",
}
_OPTIONS = frozenset({"fault", "only-policy", "at", "delay-ms", "context", "figures"})
_BYTES_A_TOKEN = 1024
_LAYER = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    writer_request_id: str
    writer_part: Part
    write: Write


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
        self._delay = _number(options, "delay-ms", 0) / 1000
        self._context = _number(options, "context", 0) or None
        self._silent = options.get("figures") == "none"
        self._cache: OrderedDict[str, _Entry] = OrderedDict()
        self._evicted: set[str] = set()
        self._served: list[str] | None = None
        self._writes = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(policies=True, max_prompt_tokens=self._context, vocabulary_size=VOCABULARY, signals=OFFERED)

    @property
    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()

    def describe(self) -> Mapping[str, object]:
        return {"model": "scripted", "fault": self._fault, "switches": asdict(self._settings.switches)}

    def reset(self) -> CacheState:
        self._expect(not self._closed, "a reset after close")
        if not self._fault.endswith("stale-cache"):
            self._cache.clear()
            self._writes = 0
        self._evicted.clear()
        self._served = []
        if self._silent:
            return CacheState(None, None)
        admitted = [] if self._fault == "hidden-stale-cache" else list(self._cache.values())
        return CacheState(len(admitted), sum(entry.write.size_bytes for entry in admitted))

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
        if self._delay:
            time.sleep(self._delay)
        answer = "" if part == "prelude" else self._answer(request_id, prompt, sampling, policy, served)
        answered = self._answered(answer, prompt, sampling, reference, shown=policy is None)
        if policy is not None:
            answered = self._reusing(answered, request_id, part, prompt, policy)
        if part == "request":
            served.append(request_id)
        return answered

    def _answered(
        self, answer: str, prompt: Prompt, sampling: Sampling, reference: Reference | None, *, shown: bool
    ) -> Served:
        """The answer as full prefill gives it, held against the reference, or `shown` as a reference itself."""
        ids = tuple(answer.encode())
        plain = Served(
            answer_ids=ids,
            answer_text=answer,
            finish_reason="length" if len(ids) == sampling.max_tokens else "stop",
            prompt_tokens=len(prompt.token_ids),
        )
        if self._silent:
            return plain
        timed = replace(plain, ttft_ms=self._ttft(prompt), total_ms=self._ttft(prompt) + len(ids) / 10)
        if reference is not None:
            differs = ids != tuple(reference.generated_ids)
            return replace(timed, kl=float(differs), reference_logprob=-0.1 * len(ids), margin=2.0)
        own = Reference(ids, [(token, BOS) for token in ids], [(-0.1, -3.0) for _ in ids])
        return replace(timed, reference=own) if shown else timed

    def _ttft(self, prompt: Prompt, saved_tokens: int = 0) -> float:
        return 1 + (len(prompt.token_ids) - saved_tokens) / 100

    def _answer(
        self, request_id: str, prompt: Prompt, sampling: Sampling, policy: Policy | None, served: list[str]
    ) -> str:
        let_in = self._let_in(request_id, prompt, policy, served)
        text = sha256(repr((prompt.token_ids, let_in)).encode()).hexdigest()[: sampling.max_tokens]
        return min((text.partition(stop)[0] for stop in sampling.stop), key=len, default=text)

    def _let_in(self, request_id: str, prompt: Prompt, policy: Policy | None, served: list[str]) -> object:
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
                return [self._cache[chunk].write.write_ordinal for chunk in chunks if chunk in self._cache] or None
            case "rounding":
                context = self._selection_context(request_id, prompt, policy)
                return checked_selection(policy, context).tolist() or None
            case "random-reuse":
                return secrets.token_hex()
        return None

    def _reusing(self, answered: Served, request_id: str, part: Part, prompt: Prompt, policy: Policy) -> Served:
        hits = self._hits(prompt)
        context = self._selection_context(request_id, prompt, policy)
        provenance = tuple(self._provenance(index, prompt) for index in hits)
        writes, evictions = self._write_back(request_id, part, prompt, provenance)
        reused = sum(prompt.segments[index].end - prompt.segments[index].start for index in hits)
        return replace(
            answered,
            ttft_ms=None if self._silent else self._ttft(prompt, reused - context.k),
            reused_tokens=reused,
            reusable_tokens=len(context.positions),
            recomputed_tokens=context.k,
            budget_k=context.k,
            selection=_selection(policy, context),
            provenance=provenance,
            writes=writes,
            evictions=evictions,
        )

    def _hits(self, prompt: Prompt) -> list[int]:
        return [
            index
            for index, segment in enumerate(prompt.segments)
            if segment.kind not in GAP_KINDS and segment.content_id in self._cache
        ]

    def _provenance(self, index: int, prompt: Prompt) -> Provenance:
        segment = prompt.segments[index]
        entry = self._cache[segment.content_id]
        return Provenance(
            segment=index,
            content_id=entry.write.content_id,
            writer_request_id=entry.writer_request_id,
            writer_part=entry.writer_part,
            write_ordinal=entry.write.write_ordinal,
            old_position=entry.write.position,
            new_position=segment.start,
            context_hash_written=entry.write.context_hash,
            context_hash_now=_context_hash(prompt, segment),
        )

    def _selection_context(self, request_id: str, prompt: Prompt, policy: Policy) -> SelectionContext:
        hits = frozenset(self._hits(prompt))
        last = len(prompt.token_ids) - 1
        reusable = [range(part.start, min(part.end, last)) for i, part in enumerate(prompt.segments) if i in hits]
        positions = np.array([position for span in reusable for position in span], dtype=np.int64)
        token_ids = np.array(prompt.token_ids, dtype=np.int64)
        deviation = (1 + (token_ids[positions] * 31 + positions * 17) % 97).astype(np.float32)
        if self._fault == "rounding":
            off = np.random.default_rng([len(self._served or ()), len(positions)]).integers(-2, 3, len(positions))
            deviation = (1 + off * Signals.precision).astype(np.float32)
        seed = int.from_bytes(sha256(request_id.encode()).digest()[:8], "little")
        segments = [
            SegmentView(part.kind, part.content_id, part.start, part.end, i in hits)
            for i, part in enumerate(prompt.segments)
        ]
        ratio = self._settings.recompute_ratio
        return SelectionContext(
            policy=policy.name,
            request_id=request_id,
            layer=_LAYER,
            layers=_LAYER + 1,
            k=checked_budget(policy, BudgetContext(len(positions), ratio, segments, positions)),
            positions=positions,
            token_ids=token_ids,
            segments=segments,
            rng=np.random.default_rng([self._settings.seed, seed]),
            needs=policy.needs,
            signals=Signals(deviation),
        )

    def _write_back(
        self, request_id: str, part: Part, prompt: Prompt, reused: Sequence[Provenance]
    ) -> tuple[tuple[Write, ...], tuple[Eviction, ...]]:
        for origin in reused:
            self._cache.move_to_end(origin.content_id)
        writes, evictions = list[Write](), list[Eviction]()
        for segment in _chunks(prompt):
            if segment.content_id not in self._cache and self._fault != "no-reuse":
                self._writes += 1
                tokens = segment.end - segment.start
                context, size = _context_hash(prompt, segment), tokens * _BYTES_A_TOKEN
                over = tuple(origin.write_ordinal for origin in reused if origin.new_position < segment.start)
                write = Write(segment.content_id, self._writes, segment.start, tokens, context, over, size)
                self._cache[segment.content_id] = _Entry(request_id, part, write)
                writes.append(write)
                evictions += self._make_room()
        return tuple(writes), tuple(evictions)

    def _make_room(self) -> list[Eviction]:
        capacity, evictions = self._settings.switches.capacity_bytes, list[Eviction]()
        while capacity is not None and sum(entry.write.size_bytes for entry in self._cache.values()) > capacity:
            content_id, entry = self._cache.popitem(last=False)
            self._evicted.add(content_id)
            evictions.append(Eviction(content_id, entry.write.write_ordinal, entry.write.size_bytes))
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


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"engine 'scripted': {name} is {text!r}, not a number")
    return int(text)


def _chunks(prompt: Prompt) -> list[PromptSegment]:
    return [segment for segment in prompt.segments if segment.kind not in GAP_KINDS]


def _selection(policy: Policy, context: SelectionContext) -> Selection | None:
    if not len(context.positions):
        return None
    chosen = checked_selection(policy, context)
    values = context.signals.deviation()
    deviation = dict(zip(context.positions.tolist(), values.tolist(), strict=True))
    spans = tuple(runs(chosen.tolist()))
    return Selection(
        layer=context.layer,
        spans=spans,
        deviation=tuple(sum(deviation[position] for position in range(*span)) for span in spans),
        total_deviation=float(values.sum(dtype=np.float64)),
    )


def _context_hash(prompt: Prompt, segment: PromptSegment) -> str:
    return sha256(repr(prompt.token_ids[: segment.start]).encode()).hexdigest()[:16]
