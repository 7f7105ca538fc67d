"""Greedy decoding, and holding an answer against the full-prefill answer in one teacher-forced pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines.endings import Answer, Ending, coarse_kl
from kvaudit.errors import EngineError
from kvaudit.records import Reference

TOP_LOGPROBS = 1024
"""Likeliest tokens kept per answer token of a reference: KL takes them one by one and all others as one event."""

NEAR_TIE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 1.0}
"""Logit margins below which one pass and step-by-step decoding might choose differently, by rounding alone."""


@dataclass(frozen=True, slots=True)
class Check:
    """A run held against a reference answer of T tokens, teacher-forced.

    `choices` int64 [T] are the run's own greedy tokens, `margins` float64 [T] the differences of its two best logits,
    `kl` the mean KL(reference || run) in nats or None, `logprob` the summed log-probability of the answer.
    """

    choices: np.ndarray
    margins: np.ndarray
    kl: float | None
    logprob: float


def greedy(first: Tensor, ending: Ending, step: Callable[[int, int], Tensor]) -> tuple[Answer, list[Tensor]]:
    """Decode from the prompt's logits [V]. `step(token, i)` computes the i-th answer token and returns its logits."""
    rows = [first]
    while not ending.push(int(rows[-1].argmax())):
        rows.append(step(ending.generated[-1], len(ending.generated) - 1))
    assert ending.answer is not None
    return ending.answer, rows


def margins_of(logits: Tensor) -> np.ndarray:
    """Difference of the two best logits per row, float64 [T]. Raises EngineError where logits are not finite."""
    best = logits.topk(2, -1).values.double()
    if not torch.isfinite(best).all():
        raise EngineError("the logits are not finite", "try --dtype float32 or bfloat16")
    return (best[:, 0] - best[:, 1]).cpu().numpy()


def reference_of(answer: Answer, rows: Sequence[Tensor]) -> Reference:
    """The reference of a full-prefill answer from the logits [V] of its T steps."""
    logprobs = torch.stack(list(rows)).log_softmax(-1)
    top = logprobs.topk(min(TOP_LOGPROBS, logprobs.shape[-1]), -1)
    return Reference(
        answer.generated,
        top.indices.to(torch.int32).cpu().numpy(),  # type: ignore[arg-type]
        top.values.cpu().numpy(),  # type: ignore[arg-type]
    )


def check(logits: Tensor, reference: Reference) -> Check:
    """Hold teacher-forced logits [T, V] against the reference."""
    logprobs = logits.log_softmax(-1)
    forced = torch.tensor(reference.generated_ids, device=logits.device)
    own = logprobs.gather(1, forced[:, None])
    kl = None
    if len(reference.top_ids):
        ids = torch.as_tensor(np.asarray(reference.top_ids), dtype=torch.long, device=logits.device)
        expected = np.asarray(reference.top_logprobs, dtype=np.float64)
        kl = coarse_kl(expected, logprobs.gather(1, ids).double().cpu().numpy())
    return Check(logits.argmax(-1).cpu().numpy(), margins_of(logits), kl, float(own.double().sum()))
