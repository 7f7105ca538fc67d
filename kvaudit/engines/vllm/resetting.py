"""Proof, when the engine is opened, that LMCache reuses what it stored and that a reset truly empties it.

vLLM's `reset_prefix_cache(reset_connector=True)` says that it worked and empties nothing of LMCache; and an LMCache
that failed to start answers every prompt cold, without a word. Both are seen here, before the first arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def prove(
    engine: Provable, separator: Sequence[int], vocabulary: int, reset: Callable[[], CacheState] | None = None
) -> None:
    """Serve a probe cold, warm and, after a reset, cold again. Raises EngineError for reuse that does not happen, for
    entries that are left, and for an answer after the reset that is not the cold one's.

    `reset` stands in place of the engine's own.
    """
    empty = reset or engine.reset
    probe = _probe(separator, vocabulary)
    reference = engine.serve("kvaudit-probe-reference", "request", probe, Sampling(PROBE_TOKENS), None).reference
    assert reference is not None
    policy = LmcacheDefault()

    def served(name: str) -> Served:
        return engine.serve(f"kvaudit-probe-{name}", "request", probe, Sampling(PROBE_TOKENS), policy, reference)

    _emptied(empty())
    cold, warm = served("cold"), served("warm")
    if cold.reused_tokens:
        raise EngineError(f"LMCache reused {cold.reused_tokens} tokens of a prompt that it had never seen")
    if not warm.reused_tokens:
        raise EngineError(
            "LMCache reused nothing of a prompt that it had just stored: it runs cold in silence",
            "its log, which kvaudit keeps, says why",
        )
    _emptied(empty())
    again = served("again")
    if again.reused_tokens:
        raise EngineError(f"LMCache's reset left {again.reused_tokens} tokens that the same prompt reused again")
    if _told(again) != _told(cold):
        raise EngineError("after a reset LMCache gave another answer than the first time, with nothing reused")
    _emptied(empty())


def _told(served: Served) -> tuple[object, ...]:
    return served.answer_ids, served.reference_logprob, served.margin


def _emptied(state: CacheState) -> None:
    if state.entries:
        raise EngineError(f"LMCache's reset left {state.entries} entries in its cache")


def _probe(separator: Sequence[int], vocabulary: int) -> Prompt:
    """An instruction, two documents and a query of random ids, so long that LMCache stores and looks up each."""
    ids = np.random.default_rng(0).integers(vocabulary // 4, vocabulary // 2, size=(4, 64)).tolist()
    token_ids: list[int] = []
    segments = []
    for kind, chunk in zip((INSTRUCTION, DOCUMENT, DOCUMENT, QUERY), ids, strict=True):
        for part, tokens in ((SEPARATOR, list(separator)), (kind, chunk)):
            if token_ids or part != SEPARATOR:
                start = len(token_ids)
                token_ids += tokens
                segments.append(PromptSegment(part, tokens_digest(tokens), start, len(token_ids)))
    return Prompt(tuple(token_ids), tuple(segments))
