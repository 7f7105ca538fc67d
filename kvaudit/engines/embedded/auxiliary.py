"""The small auxiliary model beside the engine's own, whose attention a policy may ask for (CacheClip)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from kvaudit.engines import Tokenizer
from kvaudit.engines.embedded.forward import ROWS_PER_BLOCK, Transformer
from kvaudit.engines.embedded.weights import load_weights
from kvaudit.errors import EngineError
from kvaudit.models.fetch import KNOWN_MODELS
from kvaudit.models.files import resolve_model, weight_digest
from kvaudit.models.gguf_file import parsed_once
from kvaudit.models.tokenizer import load_tokenizer
from kvaudit.policies import Floats
from kvaudit.records import Prompt

DEFAULT_MODEL = "smollm2-135m"

Borders = NDArray[np.float64]
"""Where the tokens of a text begin and end, in characters: token i covers [borders[i], borders[i + 1])."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SmallModel:
    """An opened auxiliary model: `name` and `digest` of its weights stand in the manifest."""

    name: str
    digest: str
    transformer: Transformer
    tokenizer: Tokenizer


_standing: WeakValueDictionary[tuple[str, torch.dtype, torch.device], SmallModel] = WeakValueDictionary()
"""By name, dtype and device the model that was opened last, as long as somebody holds it."""


def open_model(name: str, dtype: torch.dtype, device: torch.device, standing: SmallModel | None = None) -> SmallModel:
    """The model out of its files, or `standing` where that has the same weights, of this dtype on this device.

    Raises UsageError for a model that cannot be had or computed, EngineError for files that are damaged.
    """
    files = resolve_model(name)
    digest = weight_digest(files)
    if standing is not None and standing.digest == digest:
        return standing
    with parsed_once():
        tokenizer = load_tokenizer(files)
        transformer = Transformer(load_weights(files, dtype, device))
    return SmallModel(files.name, digest, transformer, tokenizer)


class Auxiliary:
    """Opens its model when it is asked for the first time, and keeps nothing between requests.

    One that is made while somebody holds another which has opened this model takes that over when it opens its own, so
    that the cells of a study load it once. Nobody changes weights, and nothing else is shared.

    `name` is what `--model` takes; `tokenizer` the engine's own, in whose tokens prompts are counted; `model` the
    auxiliary model where it is open already, `digest` that of its weights where it is known.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        dtype: torch.dtype,
        device: torch.device,
        model: SmallModel | None = None,
        digest: str | None = None,
    ) -> None:
        self._name, self._tokenizer, self._kind = name, tokenizer, (dtype, device)
        self._model, self._digest = model, digest
        self._before = _standing.get((name, dtype, device))

    def open(self) -> SmallModel:
        """The model, loaded where it was not yet: call it before a request is timed."""
        if self._model is None:
            self._model = open_model(self._name, *self._kind, self._before)
            self._before = None
            _standing[self._name, *self._kind] = self._model
        return self._model

    def describe(self) -> dict[str, str]:
        """For the manifest: the model's name; of one that kvaudit fetches, the SHA-256 that its file must have; the
        digest of its weights (`weight_digest`, another number) where it is known or open."""
        digest = self._digest if self._model is None else self._model.digest
        pinned = KNOWN_MODELS.get(self._name)
        return (
            {"auxiliary_model": self._name}
            | ({} if pinned is None else {"auxiliary_file_sha256": pinned.sha256})
            | ({} if digest is None else {"auxiliary_weights_sha256": digest})
        )

    def attention(self, prompt: Prompt, start: int, end: int) -> Floats:
        """float32 [H', n]: attention of the prompt's tokens [start, end) over its n tokens in the last layer of the
        auxiliary model, which prefills the whole prompt; mean over those rows.

        Where the two models do not share a tokenizer, the prompt's text is tokenised again, and what an auxiliary
        token is looked at goes to the tokens that share its text, by the characters that they share; so does the
        choice of rows. What has no text of the prompt's (a BOS token that the auxiliary model wants) goes to nobody.

        Raises EngineError for a prompt that is longer than the auxiliary model's positions.
        """
        model = self.open()
        if model.tokenizer.digest == self._tokenizer.digest:
            rows = np.zeros(len(prompt.token_ids))
            rows[start:end] = 1
            return self._last_layer(model, prompt.token_ids, rows)
        text, borders = characters(self._tokenizer, prompt.token_ids)
        leading = model.tokenizer.leading_ids
        token_ids = [*leading, *model.tokenizer.encode(text)]
        told, told_borders = characters(model.tokenizer, token_ids[len(leading) :])
        if told != text:
            raise EngineError(
                f"the tokenizer of auxiliary model {model.name!r} changes the text of a prompt",
                "take another model with --option auxiliary=MODEL",
            )
        shares = Shares.of(told_borders, borders)
        rows = np.concatenate((np.zeros(len(leading)), shares.back(start, end)))
        return shares.moved(self._last_layer(model, token_ids, rows)[:, len(leading) :])

    def _last_layer(self, model: SmallModel, token_ids: Sequence[int], rows: NDArray[np.float64]) -> Floats:
        most = model.transformer.weights.max_positions
        if len(token_ids) > most:
            raise EngineError(
                f"a prompt of {len(token_ids):,} tokens is longer than the {most:,} positions of auxiliary model "
                f"{model.name!r}",
                "take another model with --option auxiliary=MODEL",
            )
        return last_layer_attention(model.transformer, token_ids, rows)


@torch.inference_mode()
def last_layer_attention(transformer: Transformer, token_ids: Sequence[int], rows: NDArray[np.float64]) -> Floats:
    """float32 [H, n]: the mean of the attention rows of the last layer in a prefill of n tokens, weighted by `rows`
    float64 [n]."""
    t, last = transformer, transformer.layers - 1
    normed, rotation = t.normed(last, t.below(last, token_ids)), t.rotation(0, len(token_ids))
    keys = rotation.of(t.raw_keys(last, normed))
    chosen = np.flatnonzero(rows)
    total = torch.zeros(t.heads, len(token_ids), dtype=torch.float32, device=t.device)
    for block in np.array_split(chosen, max(1, -(-len(chosen) // ROWS_PER_BLOCK))):
        at = torch.from_numpy(block).to(t.device)
        weights = torch.from_numpy(rows[block]).to(t.device, torch.float32)
        total += (t.attention(t.queries(last, normed[at], rotation[at]), keys, at) * weights[:, None]).sum(1)
    attention: Floats = (total / float(rows.sum())).cpu().numpy()
    return attention


def characters(decoder: Decoder, token_ids: Sequence[int]) -> tuple[str, Borders]:
    """The text of n tokens and the borders float64 [n + 1] between them.

    Tokens that make up a character only together cover it in equal parts. Each is decoded behind the one before it,
    for tokenizers that drop a space at the start of a text.
    """
    pieces: list[str] = []
    borders, length = [0.0], 0
    behind = first = 0
    for end in range(1, len(token_ids) + 1):
        before = decoder.decode(token_ids[behind:first])
        text = decoder.decode(token_ids[behind:end])
        if end < len(token_ids) and (len(text) <= len(before) or text.endswith(_UNFINISHED)):
            continue
        piece = text[len(before) :]
        borders += (length + len(piece) * np.arange(1, end - first + 1) / (end - first)).tolist()
        pieces.append(piece)
        length += len(piece)
        behind, first = first, end
    return "".join(pieces), np.array(borders)


@dataclass(frozen=True, slots=True)
class Shares:
    """Two tilings of one text by tokens, cut at every border of either: piece p lies in auxiliary token `theirs[p]` and
    in token `ours[p]`, and is the share `of_theirs[p]` of the former's length. Of m auxiliary tokens and n tokens."""

    theirs: NDArray[np.int64]
    ours: NDArray[np.int64]
    of_theirs: NDArray[np.float64]
    m: int
    n: int

    @classmethod
    def of(cls, their_borders: Borders, our_borders: Borders) -> Shares:
        cuts = np.union1d(their_borders, our_borders)
        theirs = np.searchsorted(their_borders, cuts[:-1], side="right") - 1
        ours = np.searchsorted(our_borders, cuts[:-1], side="right") - 1
        of_theirs = np.diff(cuts) / np.diff(their_borders)[theirs]
        return cls(theirs, ours, of_theirs, len(their_borders) - 1, len(our_borders) - 1)

    def back(self, start: int, end: int) -> NDArray[np.float64]:
        """float64 [m]: which share of each auxiliary token lies in the tokens [start, end)."""
        inside = (self.ours >= start) & (self.ours < end)
        return np.bincount(self.theirs[inside], self.of_theirs[inside], self.m).astype(np.float64)

    def moved(self, attention: Floats) -> Floats:
        """[H', m] over auxiliary tokens -> float32 [H', n] over tokens."""
        parts = attention[:, self.theirs] * self.of_theirs
        return np.stack([np.bincount(self.ours, head, self.n) for head in parts]).astype(np.float32)
