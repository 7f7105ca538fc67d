"""How an answer ends and how far it is from the reference, the same for every engine that decodes here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvaudit.engines import Tokenizer
from kvaudit.records import Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """What greedy decoding produced. `generated` includes a stop or end token, `token_ids` and `text` do not."""

    generated: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Ending:
    """Decides, token by token, whether an answer has ended: an end token, a stop string, or the limit."""

    tokenizer: Tokenizer
    sampling: Sampling
    end_ids: frozenset[int]
    generated: list[int] = field(default_factory=list)
    answer: Answer | None = None

    def push(self, token_id: int) -> bool:
        self.generated.append(token_id)
        kept = self.generated[:-1] if token_id in self.end_ids else self.generated
        text = self.tokenizer.decode(kept)
        cut = min((at for at in map(text.find, self.sampling.stop) if at >= 0), default=None)
        if cut is not None:
            self._end(self._wholly_before(cut, kept), text[:cut], "stop")
        elif token_id in self.end_ids:
            self._end(kept, text, "stop")
        elif len(self.generated) >= self.sampling.max_tokens:
            self._end(kept, text, "length")
        return self.answer is not None

    def _end(self, kept: Sequence[int], text: str, reason: str) -> None:
        self.answer = Answer(tuple(self.generated), tuple(kept), text, reason)

    def _wholly_before(self, cut: int, kept: list[int]) -> list[int]:
        """The tokens whose text ends at or before character `cut`."""
        count = len(kept)
        while count and len(self.tokenizer.decode(kept[:count])) > cut:
            count -= 1
        return kept[:count]


def coarse_kl(expected: np.ndarray, observed: np.ndarray) -> float:
    """Mean over T rows of the KL divergence in nats over C tokens and one event for all the rest.

    Both are float64 [T, C] log-probabilities of the same tokens. Merging events never enlarges a KL divergence, so
    this is a lower bound of the exact one.
    """
    p, q = np.exp(expected), np.exp(observed)
    rest_p = np.clip(1 - p.sum(1), 1e-12, None)
    rest_q = np.clip(1 - q.sum(1), 1e-12, None)
    per_row = (p * (expected - observed)).sum(1) + rest_p * (np.log(rest_p) - np.log(rest_q))
    return float(np.maximum(0.0, per_row.mean()))
