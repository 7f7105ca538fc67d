"""An answer of vLLM's, ended as the embedded engine ends one, and held against a full-prefill answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvaudit.engines import Tokenizer
from kvaudit.engines.endings import Answer, Ending, coarse_kl
from kvaudit.engines.vllm.launch import Asked, Running, Token
from kvaudit.errors import EngineError
from kvaudit.records import Prompt, Reference, Sampling

TOP_LOGPROBS = 256
"""Likeliest tokens that vLLM is asked for at each answer token."""


@dataclass(frozen=True, slots=True)
class Answered:
    """`answer` is None for a prelude, which is not decoded (vLLM generates one token, which nobody sees)."""

    asked: Asked
    answer: Answer | None


def answer(
    running: Running,
    prompt: Prompt,
    sampling: Sampling,
    tokenizer: Tokenizer,
    end_ids: frozenset[int],
    salt: str | None = None,
) -> Answered:
    """Greedy decoding that ends with an end token, a stop string or the limit, by the rules of the embedded engine."""
    if sampling.max_tokens == 0:
        return Answered(running.ask(prompt.token_ids, 1, lambda token_id: True, salt=salt), None)
    ending = Ending(tokenizer, sampling, end_ids)
    asked = running.ask(prompt.token_ids, sampling.max_tokens, ending.push, TOP_LOGPROBS, salt, end_ids)
    if ending.answer is None:
        raise EngineError(f"vLLM gave {len(asked.tokens)} tokens of {sampling.max_tokens} and no end")
    return Answered(asked, ending.answer)


def reference_of(tokens: Sequence[Token]) -> Reference:
    """The reference of a full-prefill answer: ids and log-probabilities [T, C], C the fewest that any step gave."""
    count = min(TOP_LOGPROBS, *(len(token.top) for token in tokens))
    return Reference(
        tuple(token.token_id for token in tokens),
        np.array([list(token.top)[:count] for token in tokens], dtype=np.int32),  # type: ignore[arg-type]
        np.array([list(token.top.values())[:count] for token in tokens], dtype=np.float32),  # type: ignore[arg-type]
    )


def margin_of(token: Token) -> float:
    """The difference of the two best log-probabilities of a step, which is that of the two best logits."""
    best, second, *_ = token.top.values()
    return best - second


def against(tokens: Sequence[Token], reference: Reference) -> dict[str, Any]:
    """The fields of `Served` that hold an answer against the reference.

    vLLM cannot be made to follow the reference over the same mixed cache once its own answer has left it: `kl` and
    `reference_logprob` are None then. `margin` is that of the step where they part, else the smallest along it.
    """
    forced = reference.generated_ids
    if not forced:
        raise EngineError("the reference answer has no tokens")
    steps = enumerate(zip(tokens, forced, strict=False))
    parted = next((step for step, (token, expected) in steps if token.token_id != expected), None)
    if parted is not None:
        return {"margin": margin_of(tokens[parted])}
    followed = tokens[: len(forced)]
    margin = min(map(margin_of, followed))
    if len(followed) < len(forced):
        return {"margin": margin}
    logprob = sum(token.top[expected] for token, expected in zip(followed, forced, strict=True))
    return {"margin": margin, "reference_logprob": logprob, "kl": _kl(followed, reference)}


def _kl(tokens: Sequence[Token], reference: Reference) -> float | None:
    """Mean over the answer's tokens of KL(full prefill || run) over the tokens that both sides' likeliest hold, and one
    event for all others: a lower bound of the exact one, as merged events never enlarge it."""
    if not len(reference.top_ids):
        return None
    rows = []
    for token, ids, logprobs in zip(tokens, reference.top_ids, reference.top_logprobs, strict=True):
        shared = [(float(p), token.top[int(i)]) for i, p in zip(ids, logprobs, strict=True) if int(i) in token.top]
        expected, observed = np.array(shared, dtype=np.float64).T
        rows.append(coarse_kl(expected[None], observed[None]))
    return float(np.mean(rows))
