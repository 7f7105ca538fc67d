"""Proof, when the engine is opened, that LMCache reuses what it stored and that a reset truly empties it.

vLLM's `reset_prefix_cache(reset_connector=True)` says that it worked and empties nothing of LMCache; and an LMCache
that failed to start answers every prompt cold, without a word. Both are seen here, before the first arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvaudit.errors import EngineError
from kvaudit.policies import Policy
from kvaudit.policies.lmcache_default import LmcacheDefault
from kvaudit.prompts import tokens_digest
from kvaudit.records import (
    DOCUMENT,
    INSTRUCTION,
    QUERY,
    SEPARATOR,
    CacheState,
    Part,
    Prompt,
    PromptSegment,
    Reference,
    Sampling,
    Served,
)

PROBE_TOKENS = 3
"""How many answer tokens are compared."""
SAME_WITHIN = 0.25
"""Nats by which the same answer's log-probability and margin may differ: a GPU gives other last digits each time."""


class Provable(Protocol):
    def serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None = None,
    ) -> Served: ...

    def reset(self) -> CacheState: ...


def prove(engine: Provable, separator: Sequence[int], vocabulary: int, chunk_tokens: int) -> None:
    """Serve a probe cold, warm and, after a reset, cold again. Raises EngineError for reuse that does not happen, for
    entries that are left, and for an answer after the reset that is not the cold one's.

    `chunk_tokens` is LMCache's chunk size: the probe is longer.
    """
    probe = _probe(separator, vocabulary, chunk_tokens)
    reference = engine.serve("kvaudit-probe-reference", "request", probe, Sampling(PROBE_TOKENS), None).reference
    assert reference is not None
    policy = LmcacheDefault()

    def served(name: str) -> Served:
        return engine.serve(f"kvaudit-probe-{name}", "request", probe, Sampling(PROBE_TOKENS), policy, reference)

    _emptied(engine.reset())
    cold, warm = served("cold"), served("warm")
    if cold.reused_tokens:
        raise EngineError(f"LMCache reused {cold.reused_tokens} tokens of a prompt that it had never seen")
    if not warm.reused_tokens:
        raise EngineError(
            "LMCache reused nothing of a prompt that it had just stored: it runs cold in silence",
            "its log, which kvaudit keeps, says why",
        )
    _emptied(engine.reset())
    again = served("again")
    if again.reused_tokens:
        raise EngineError(f"LMCache's reset left {again.reused_tokens} tokens that the same prompt reused again")
    if not _same(again, cold):
        raise EngineError("after a reset LMCache gave another answer than the first time, with nothing reused")
    _emptied(engine.reset())


def _same(one: Served, other: Served) -> bool:
    """The same answer, and its figures as far as a GPU gives the same ones twice."""
    return one.answer_ids == other.answer_ids and all(
        a == b or (a is not None and b is not None and abs(a - b) <= SAME_WITHIN)
        for a, b in ((one.reference_logprob, other.reference_logprob), (one.margin, other.margin))
    )


def _emptied(state: CacheState) -> None:
    if state.entries:
        raise EngineError(f"LMCache's reset left {state.entries} entries in its cache")


def _probe(separator: Sequence[int], vocabulary: int, chunk_tokens: int) -> Prompt:
    """An instruction, two documents and a query of random ids, together longer than a chunk of LMCache's."""
    length = max(64, -(-chunk_tokens // 3))
    ids = np.random.default_rng(0).integers(vocabulary // 4, vocabulary // 2, size=(4, length)).tolist()
    token_ids: list[int] = []
    segments = []
    for kind, chunk in zip((INSTRUCTION, DOCUMENT, DOCUMENT, QUERY), ids, strict=True):
        for part, tokens in ((SEPARATOR, list(separator)), (kind, chunk)):
            if token_ids or part != SEPARATOR:
                start = len(token_ids)
                token_ids += tokens
                segments.append(PromptSegment(part, tokens_digest(tokens), start, len(token_ids)))
    return Prompt(tuple(token_ids), tuple(segments))
