"""What the checks work with: seeded prompts of chunks and separators, served one by one on an engine under probe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np

from kvaudit.doctor.checks.findings import Inconclusive
from kvaudit.doctor.checks.given import Given
from kvaudit.doctor.checks.measuring import Scale
from kvaudit.engines import Probed, Rows
from kvaudit.policies import Floats, Policy
from kvaudit.prompts import prompt_of
from kvaudit.records import DOCUMENT, QUERY, SEPARATOR, Prompt, Reference, Sampling, Served

Chunk = tuple[int, ...]

UNRELATED = 1.0
"""About how far, relative, keys and values are apart that have nothing to do with each other."""

SMALLEST_UNIT = 16
"""Chunks have at least so many tokens, so that what is added or lost of one is not chance."""

QUERY_TOKENS = 4
SEPARATOR_TOKENS = 2
ANSWER_TOKENS = 4

NOTHING_TO_BLEND = "there is nothing to blend: what is reused is used as it is, and none of it can be recomputed"


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt of chunks, and what the engine said of it. `hits` and `stored_gaps` number the chunks that were reused
    and those whose separator, which follows them, was reused as well."""

    served: Served
    prompt: Prompt

    @property
    def hits(self) -> frozenset[int]:
        return frozenset(index // 2 for index in self._reused if not index % 2)

    @property
    def stored_gaps(self) -> frozenset[int]:
        return frozenset(index // 2 for index in self._reused if index % 2)

    @property
    def evicts_chunks(self) -> bool:
        """Whether anything but separators made room: of those, which stand everywhere, an engine may keep few
        versions."""
        gaps = {segment.content_id for segment in self.prompt.segments if segment.kind == SEPARATOR}
        return any(eviction.content_id not in gaps for eviction in self.served.evictions)

    @property
    def layer(self) -> int:
        """The layer from which rows were recomputed."""
        if self.served.selection is None:
            raise Inconclusive(NOTHING_TO_BLEND)
        return self.served.selection.layer

    def require_hits(self, chunks: Iterable[int]) -> None:
        """Raise Inconclusive unless these chunks were reused."""
        if not self.served.reused_tokens:
            raise Inconclusive("nothing was reused")
        missing = sorted(set(chunks) - self.hits)
        if missing:
            raise Inconclusive(f"chunk {missing[0] + 1} of a prompt was not reused, though it was stored before")

    def require_recomputed(self, positions: Iterable[int]) -> None:
        """Raise Inconclusive unless exactly these rows, out of those that were reused, were recomputed."""
        if not self.served.reusable_tokens or self.served.selection is None:
            raise Inconclusive(NOTHING_TO_BLEND)
        chosen = {position for start, end in self.served.selection.spans for position in range(start, end)}
        if chosen != set(positions):
            raise Inconclusive(f"the engine recomputed {len(chosen)} rows that were not those that it was told to")

    @property
    def _reused(self) -> list[int]:
        return [source.segment for source in self.served.provenance]


@dataclass(frozen=True, slots=True)
class SeenRows(Seen):
    """`states` float32 [L, P, G, 2 D]: keys, then values, of the positions that were asked for."""

    rows: Rows

    @property
    def states(self) -> Floats:
        return np.concatenate([self.rows.keys, self.rows.values], -1)


class Lab:
    """One check's prompts on an engine: chunks of its own, drawn with a seed from the engine's vocabulary.

    `noise`: the engine's own, relative; None where it could not be measured. Everything is inconclusive, with the
    reason, that the engine will not do.
    """

    def __init__(self, engine: Probed, check: str, noise: float | None, seed: int = 0) -> None:
        self.engine, self.check, self._noise = engine, check, noise
        self._random = np.random.default_rng(int.from_bytes(sha256(f"{seed}:{check}".encode()).digest()[:8], "big"))
        self._rules = engine.chunk_rules
        self._leading = () if engine.tokenizer is None else tuple(engine.tokenizer.leading_ids)
        self._served = 0
        self._firsts = set(self._leading)
        vocabulary = engine.capabilities.vocabulary_size
        if vocabulary is None:
            raise Inconclusive("the engine does not say which token ids it knows")
        self._vocabulary = np.setdiff1d(np.arange(vocabulary), [*self._leading, *(self._rules.separator_ids or ())])
        if self._rules.separator_ids is None:
            drawn = self._random.choice(self._vocabulary, SEPARATOR_TOKENS, replace=False)
            self._vocabulary = np.setdiff1d(self._vocabulary, drawn)
            self._separator: Chunk = tuple(map(int, drawn))
        else:
            self._separator = self._rules.separator_ids
        self.reset()

    @property
    def smallest(self) -> int:
        """Tokens of the shortest chunk that the engine promises to keep."""
        return self._rules.chunk_tokens

    @cached_property
    def unit(self) -> int:
        """Tokens of an ordinary chunk."""
        return max(SMALLEST_UNIT, 2 * self.smallest)

    @property
    def gap_tokens(self) -> int:
        return len(self._separator)

    @property
    def scale(self) -> Scale:
        if self._noise is None:
            raise Inconclusive("the engine's own noise is not known, and nothing can be held against it")
        scale = Scale(self._noise)
        if not scale.plain(UNRELATED):
            raise Inconclusive("the engine's own noise drowns everything", {"noise": self._noise})
        return scale

    def reset(self) -> None:
        """Empty the cache. Raises Inconclusive where the engine sees entries in it afterwards."""
        left = self.engine.reset().entries
        if left:
            raise Inconclusive(f"the cache still holds {left} entries after a reset")

    def chunk(self, tokens: int | None = None) -> Chunk:
        """A chunk that begins with a token with which no other chunk of this lab begins."""
        free = np.setdiff1d(self._vocabulary, list(self._firsts))
        first = int(self._random.choice(free if len(free) else self._vocabulary))
        self._firsts.add(first)
        rest = self._random.choice(self._vocabulary, (self.unit if tokens is None else tokens) - 1)
        return first, *map(int, rest)

    def at(self, chunks: Sequence[Chunk], index: int) -> range:
        """The positions of a chunk in a prompt of these chunks."""
        before = sum(len(chunk) + self.gap_tokens for chunk in chunks[:index]) + len(self._leading)
        return range(before, before + len(chunks[index]))

    def gap_after(self, chunks: Sequence[Chunk], index: int) -> range:
        """The positions of the separator that follows a chunk."""
        end = self.at(chunks, index).stop
        return range(end, end + self.gap_tokens)

    def prompt(self, *chunks: Chunk) -> Prompt:
        """The chunks with a separator after each, then a query that no other prompt has."""
        return prompt_of(self._pieces(chunks))

    def serve(self, *chunks: Chunk) -> Seen:
        """Serve a prompt in which nothing is recomputed but the first row of the first chunk."""
        prompt = self.prompt(*chunks)
        policy = Given((self.at(chunks, 0).start,))
        served = self.engine.serve(self._request_id(), "request", prompt, Sampling(1), policy)
        return Seen(served, prompt)

    def store(self, *chunks: Chunk) -> Seen:
        """Serve a prompt of chunks that are new. Raises Inconclusive where the cache held one of them already."""
        seen = self.serve(*chunks)
        if seen.hits:
            raise Inconclusive("the cache held a chunk that nobody had stored since it was emptied")
        return seen

    def rows(self, *chunks: Chunk, at: Iterable[int], recompute: Iterable[int] | None = None) -> SeenRows:
        """Serve a prompt whose chunks are all to be reused, and show some rows of it.

        recompute: these positions (default: the first row of the first chunk) and no other. Raises Inconclusive where
        a chunk is not reused, other rows are recomputed, or a row is not shown.
        """
        prompt = self.prompt(*chunks)
        chosen = tuple(recompute) if recompute is not None else (self.at(chunks, 0).start,)
        policy: Policy = Given(chosen)
        shown = self.engine.rows(self._request_id(), prompt, policy, np.fromiter(at, dtype=np.int64))
        seen = SeenRows(shown.served, prompt, shown)
        seen.require_hits(range(len(chunks)))
        seen.require_recomputed(chosen)
        if not (np.isfinite(shown.keys).all() and np.isfinite(shown.values).all()):
            raise Inconclusive("the engine did not show rows of the blended prompt")
        return seen

    def full_prefill(self, *chunks: Chunk) -> Reference:
        """The answer that is computed from the prompt alone. Raises Inconclusive where an engine tells none."""
        served = self.engine.serve(self._request_id(), "request", self.prompt(*chunks), Sampling(ANSWER_TOKENS), None)
        if served.reference is None:
            raise Inconclusive("the engine does not tell what it generated in a full prefill")
        return served.reference

    def _pieces(self, chunks: Sequence[Chunk]) -> Iterator[tuple[str, Chunk]]:
        for index, chunk in enumerate(chunks):
            yield DOCUMENT, (*self._leading, *chunk) if not index else chunk
            yield SEPARATOR, self._separator
        yield QUERY, tuple(map(int, self._random.choice(self._vocabulary, QUERY_TOKENS)))

    def _request_id(self) -> str:
        self._served += 1
        return f"doctor-{self.check}-{self._served}".replace(" ", "-")
