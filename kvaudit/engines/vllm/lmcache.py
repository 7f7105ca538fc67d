"""Engine `lmcache`: vLLM with LMCache's blending (CacheBlend), as people deploy it, kvaudit's policies inside it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvaudit.engines import Capabilities, ChunkRules, EngineSettings, Rows, Tokenizer
from kvaudit.engines.vllm.answering import against, answer, reference_of
from kvaudit.engines.vllm.chunking import Chunking
from kvaudit.engines.vllm.launch import Running
from kvaudit.engines.vllm.starting import Place
from kvaudit.engines.vllm.worker.job import Blended, Job, Mode, Record
from kvaudit.engines.vllm.worker.session import NOT_STORED
from kvaudit.engines.vllm.worker.signals import OFFERED
from kvaudit.errors import EngineError, PolicyError
from kvaudit.models.fetch import announce
from kvaudit.policies import Policy, Positions
from kvaudit.policies.rounding import Watched
from kvaudit.records import CacheState, Part, Prompt, Reference, Sampling, Selection, Served, runs


class LmcacheEngine:
    """Implements `kvaudit.engines.Probed`.

    A policy that stands for LMCache's own selection (`Policy.engine`) leaves it untouched; every other one selects in
    its place. What LMCache would do in silence is an error here: an engine that was not made, a lookup that timed out,
    a load that fell short.
    """

    def __init__(
        self,
        running: Running,
        place: Place,
        settings: EngineSettings,
        chunking: Chunking,
        environment: Mapping[str, str],
    ) -> None:
        """`environment`: what the manifest tells of the variables in force."""
        self._running, self._place, self._settings, self._chunking = running, place, settings, chunking
        self._environment = environment
        self._warned: set[str] = set()
        self._health: Mapping[str, Any] = running.rpc("kvaudit_health")

    @property
    def health(self) -> Mapping[str, Any]:
        """What the worker said of itself when it was opened."""
        return self._health

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            policies=True,
            max_prompt_tokens=self._place.max_model_len,
            vocabulary_size=self._place.vocabulary,
            signals=OFFERED,
            selects_once=True,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._place.tokenizer

    @property
    def chunk_rules(self) -> ChunkRules:
        return ChunkRules(self._chunking.separator, self._chunking.chunk_tokens)

    def describe(self) -> Mapping[str, object]:
        connector = self._health["connector"]
        return {
            **self._place.describe(),
            "switches": asdict(self._settings.switches),
            "recompute_ratio": self._settings.recompute_ratio,
            "attention_backend": self._health["attention_backend"],
            "lmcache_settings": connector["settings"],
            "lmcache_environment": dict(sorted(self._environment.items())),
            "lmcache_on_cpu_shim": connector["shim"],
        }

    def serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None = None,
    ) -> Served:
        return self._serve(request_id, part, prompt, sampling, policy, reference)[0]

    def rows(self, request_id: str, prompt: Prompt, policy: Policy, positions: Positions) -> Rows:
        served, record = self._serve(request_id, "request", prompt, Sampling(1), policy, None, positions)
        shape = (self._place.layers, len(positions), self._place.kv_heads, self._place.head_dim)
        if record.rows is None:
            nothing = np.full(shape, np.nan, dtype=np.float32)
            return Rows(served, nothing, nothing)
        return Rows(served, record.rows.keys.reshape(shape), record.rows.values.reshape(shape))

    def reset(self) -> CacheState:
        left = self._running.rpc("kvaudit_clear")
        return CacheState(left["entries"], left["size_bytes"])

    def close(self) -> None:
        self._running.close()

    def _serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None,
        rows: Positions | None = None,
    ) -> tuple[Served, Record]:
        self._chunking.check(request_id, prompt)
        mode, place = _mode(policy), self._place
        job = Job(
            request_id,
            part,
            prompt,
            mode,
            self._settings.recompute_ratio,
            self._settings.seed,
            policy if mode == "policy" or isinstance(policy, Watched) else None,
            None if rows is None else tuple(rows.tolist()),
        )
        self._running.rpc("kvaudit_request", job.packed())
        answered = answer(self._running, prompt, sampling, place.tokenizer, place.end_ids)
        record = _checked(Record.unpacked(self._running.rpc("kvaudit_record")), policy)
        if policy is None and answered.asked.cached_tokens:
            raise EngineError(f"vLLM took {answered.asked.cached_tokens} tokens of a full prefill from a cache")
        self._chunking.compare(request_id, prompt, record)
        self._tell(record.warnings)
        asked, made = answered.asked, answered.answer
        facts = _facts(prompt, record, told=made is not None)
        facts |= {
            "ttft_ms": None if asked.ttft_ms is None else max(0.0, asked.ttft_ms - 1000 * record.untimed_seconds),
            "total_ms": max(0.0, asked.total_ms - 1000 * record.untimed_seconds),
        }
        if made is None:
            return Served((), "", "length", **facts), record
        held = {} if reference is None else against(asked.tokens, reference)
        if reference is None and policy is None:
            held["reference"] = reference_of(asked.tokens)
        return Served(made.token_ids, made.text, made.finish_reason, **facts, **held), record

    def _tell(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            kind = re.sub(r" \(\d+ times\)$|\S*\d\S*", "", warning)
            if kind not in self._warned:
                self._warned.add(kind)
                announce(warning)


def _mode(policy: Policy | None) -> Mode:
    if policy is None:
        return "prefill"
    follows = isinstance(policy, Watched) and policy.follows
    return "own" if policy.engine == "lmcache" and not follows else "policy"


def _checked(record: Record, policy: Policy | None) -> Record:
    """The record of a proper serve, what a watched policy noticed taken over. Raises for any other."""
    if record.failure is not None:
        raise PolicyError(record.failure.message, record.failure.hint)
    if record.errors:
        full = any(NOT_STORED in error for error in record.errors)
        raise EngineError(
            f"LMCache did not serve as it should: {'; '.join(record.errors)}",
            "give it more room with --cache-capacity" if full else "the engine's log in the run folder says more",
        )
    if isinstance(policy, Watched) and record.decided is not None:
        policy.decided += record.decided
    return record


def _facts(prompt: Prompt, record: Record, *, told: bool) -> dict[str, Any]:
    blended = record.blended
    return {
        "prompt_tokens": len(prompt.token_ids),
        "reused_tokens": record.reused_tokens,
        "reusable_tokens": 0 if blended is None else blended.tokens,
        "recomputed_tokens": 0 if blended is None else len(blended.selected),
        "budget_k": 0 if blended is None else blended.k,
        "selection": None if blended is None or not told else _selection(blended),
        "provenance": record.provenance,
        "writes": record.writes,
        "evictions": record.evictions,
    }


def _selection(blended: Blended) -> Selection:
    deviation = blended.deviation.astype(np.float64)
    spans = tuple(runs(blended.selected.tolist()))
    return Selection(
        blended.layer,
        spans,
        tuple(float(deviation[start:end].sum()) for start, end in spans),
        float(deviation.sum()),
    )
