"""Selection contexts out of nothing, for tests of policies: a prompt in a mini-language and seeded signals.

"i3 d4 s1 d4- q2-" is an instruction of 3 tokens, a document of 4, a separator, a document that is not reusable and a
query that is not either. `i` instruction, `d` document, `m` message, `t` tool result, `q` query, `s` separator,
`g` glue; a trailing `-` marks a segment that is not reusable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvaudit.errors import PolicyError
from kvaudit.policies import (
    ChunkAttention,
    Floats,
    Need,
    Policy,
    Positions,
    SegmentView,
    SelectionContext,
    Written,
    WrittenAttention,
)
from kvaudit.records import DOCUMENT, GAP_KINDS, GLUE, INSTRUCTION, MESSAGE, QUERY, SEPARATOR, TOOL_RESULT

LAYERS = 4
HEADS = 3
CHECK_LAYER = 1
ALL_NEEDS: frozenset[Need] = frozenset(get_args(Need))

KINDS: Mapping[str, str] = {
    "i": INSTRUCTION,
    "d": DOCUMENT,
    "m": MESSAGE,
    "t": TOOL_RESULT,
    "q": QUERY,
    "s": SEPARATOR,
    "g": GLUE,
}

_WORD = re.compile(r"([idmtqsg])([1-9][0-9]*)(-?)")


class Piece(NamedTuple):
    """A word of a layout and where it stands: tokens [start, end) of a kind."""

    word: str
    kind: str
    start: int
    end: int
    is_reusable: bool

    @property
    def is_hit(self) -> bool:
        """Whether it is a chunk from the cache: what stands between chunks may be reusable, and is none."""
        return self.is_reusable and self.kind not in GAP_KINDS


def pieces(layout: str) -> Iterator[Piece]:
    """What a layout in the mini-language says. Raises ValueError for what it has no meaning for."""
    start = 0
    for word in layout.split():
        matched = _WORD.fullmatch(word)
        if matched is None:
            raise ValueError(f"{word!r} in {layout!r} is no segment: write a kind and a length, such as d4 or d4-")
        end = start + int(matched[2])
        yield Piece(word, KINDS[matched[1]], start, end, not matched[3])
        start = end


@dataclass(frozen=True, slots=True)
class SyntheticPrompt:
    """n tokens, tiled by segments; `positions`: int64 [N], the reusable ones, ascending."""

    segments: tuple[SegmentView, ...]
    positions: Positions

    @property
    def tokens(self) -> int:
        return self.segments[-1].end


@dataclass(frozen=True, slots=True)
class SyntheticSignals:
    """Every signal, as arrays over the N reusable tokens.

    keys, values: float32 [L, N]. queries: float32 [L, H, N], a head's sum below 1. auxiliary: float32 [H, N].
    damage: float64 [N], what a token adds to the output's KL divergence until it is recomputed.
    """

    layer: int
    positions: Positions
    keys: Floats
    values: Floats
    queries: Floats
    auxiliary: Floats
    written: WrittenAttention
    damage: NDArray[np.float64]
    sees_deviation: bool = True

    def deviation(self) -> Floats:
        return self.key_deviation(self.layer)

    def key_deviation(self, layer: int) -> Floats:
        found: Floats = self._seen(self.keys)[layer]
        return found

    def value_deviation(self, layer: int) -> Floats:
        found: Floats = self._seen(self.values)[layer]
        return found

    def query_attention(self, layer: int) -> Floats:
        found: Floats = self.queries[layer]
        return found

    def auxiliary_attention(self) -> Floats:
        return self.auxiliary

    def written_attention(self) -> WrittenAttention:
        return self.written

    precision = float(np.finfo(np.float32).eps)

    def norms(self, need: Need, layer: int) -> Floats:
        return np.ones(len(self.positions), dtype=np.float32)

    def output_kl(self, positions: Positions) -> float:
        if not np.isin(positions, self.positions).all():
            raise PolicyError("output_kl was asked for positions that are not reusable")
        return float(self.damage[~np.isin(self.positions, positions)].sum())

    def at(self, layer: int, kept: NDArray[np.bool_]) -> SyntheticSignals:
        """The same at a later layer, for the reusable tokens that are kept."""
        return replace(
            self,
            layer=layer,
            positions=self.positions[kept],
            keys=self.keys[:, kept],
            values=self.values[:, kept],
            queries=self.queries[..., kept],
            auxiliary=self.auxiliary[:, kept],
            written=replace(self.written, outside=self.written.outside[kept]),
            damage=self.damage[kept],
        )

    def _seen(self, deviation: Floats) -> Floats:
        if not self.sees_deviation:
            raise PolicyError("a policy that starts at the first layer sees no deviation")
        return deviation


@lru_cache(maxsize=1024)
def make_prompt(layout: str, seed: int = 0) -> SyntheticPrompt:
    """Its positions cannot be written. Raises ValueError for a layout that is not in the mini-language."""
    rng = np.random.default_rng([seed, 2])
    segments, reusable = list[SegmentView](), list[int]()
    for index, piece in enumerate(pieces(layout)):
        written = _written(index, [s.content_id for s in segments], rng) if piece.is_hit else None
        content_id = f"{piece.word.rstrip('-')}-{index}"
        segments.append(SegmentView(piece.kind, content_id, piece.start, piece.end, piece.is_hit, written))
        reusable += range(piece.start, piece.end) if piece.is_reusable else ()
    positions = np.array(reusable, dtype=np.int64)
    positions.setflags(write=False)
    return SyntheticPrompt(tuple(segments), positions)


def make_context(
    layout: str,
    k: int,
    *,
    deviation: ArrayLike | None = None,
    attention: ArrayLike | None = None,
    seed: int = 0,
    needs: frozenset[Need] = ALL_NEEDS,
    policy: type[Policy] | Policy | None = None,
) -> SelectionContext:
    """A request with every signal, random but the same for the same seed.

    deviation: [N], takes the place of key and value deviation at every layer. attention: [N], that of the query's and
    the auxiliary model's attention in every head. policy: where it starts decides the layer, and its name stands in
    errors. Raises ValueError for a layout that is not in the mini-language and for arrays of another length.
    """
    prompt = make_prompt(layout, seed)
    if not 0 <= k <= len(prompt.positions):
        raise ValueError(f"{layout!r} has {len(prompt.positions)} reusable tokens: k cannot be {k}")
    at_check_layer = policy is None or policy.start == "check-layer"
    layer = CHECK_LAYER if at_check_layer else 0
    return SelectionContext(
        policy="policy" if policy is None else policy.name,
        request_id="request-1",
        layer=layer,
        layers=LAYERS,
        k=k,
        positions=prompt.positions.copy(),
        token_ids=np.random.default_rng([seed, 3]).integers(0, 1000, prompt.tokens),
        segments=prompt.segments,
        rng=np.random.default_rng(seed),
        needs=needs,
        signals=replace(make_signals(prompt, layer, seed, deviation, attention), sees_deviation=at_check_layer),
    )


def make_signals(
    prompt: SyntheticPrompt,
    layer: int,
    seed: int,
    deviation: ArrayLike | None = None,
    attention: ArrayLike | None = None,
) -> SyntheticSignals:
    rng, count = np.random.default_rng([seed, 1]), len(prompt.positions)
    queries = rng.random((LAYERS, HEADS, count)) / max(1, count)
    auxiliary = rng.random((HEADS, count)) / max(1, count)
    keys, values = rng.exponential(size=(2, LAYERS, count))
    if deviation is not None:
        keys[:] = values[:] = _as_long(deviation, count)
    if attention is not None:
        queries[:] = auxiliary[:] = _as_long(attention, count)
    return SyntheticSignals(
        layer,
        prompt.positions,
        keys.astype(np.float32),
        values.astype(np.float32),
        queries.astype(np.float32),
        auxiliary.astype(np.float32),
        _written_attention(prompt, rng),
        rng.random(count),
    )


def _as_long(values: ArrayLike, count: int) -> NDArray[np.float64]:
    given = np.asarray(values, dtype=np.float64)
    if given.shape != (count,):
        raise ValueError(f"there are {count} reusable tokens, and values of shape {given.shape} for them")
    return given


def _written(index: int, before: Sequence[str], rng: np.random.Generator) -> Written:
    """Every other chunk was written after what stands before it now, the others after something else."""
    is_same = bool(rng.integers(2))
    over = tuple(before) if is_same else tuple(before[::2])
    return Written("request-0", "request", index, int(rng.integers(100)), f"context-{is_same}", "context-True", over)


def _written_attention(prompt: SyntheticPrompt, rng: np.random.Generator) -> WrittenAttention:
    outside = np.full(prompt.tokens, np.nan, dtype=np.float32)
    chunks = list[ChunkAttention | None]()
    for segment in prompt.segments:
        tokens = segment.end - segment.start
        if segment.written is None:
            chunks.append(None)
            continue
        outside[segment.start : segment.end] = rng.random(tokens) if segment.written.over else 0
        over = float(outside[segment.start : segment.end].sum())
        shares = rng.dirichlet(np.ones(len(segment.written.over))) if segment.written.over else ()
        chunks.append(
            ChunkAttention(
                tokens - over, {c: over * float(s) for c, s in zip(segment.written.over, shares, strict=True)}
            )
        )
    return WrittenAttention(outside[prompt.positions], tuple(chunks))
