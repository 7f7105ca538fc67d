"""Selection contexts with given signals, in the mini-language of `kvaudit.policies.synthetic`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

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
from kvaudit.policies.synthetic import pieces


@dataclass(frozen=True)
class FixedSignals:
    """Signals as they were given. What was not given fails when it is asked for."""

    ranked: Floats
    keys: dict[int, Floats] = field(default_factory=dict)
    values: dict[int, Floats] = field(default_factory=dict)
    queries: dict[int, Floats] = field(default_factory=dict)
    auxiliary: Floats | None = None
    written: WrittenAttention | None = None
    kl: dict[tuple[int, ...], float] = field(default_factory=dict)

    def deviation(self) -> Floats:
        return self.ranked

    def key_deviation(self, layer: int) -> Floats:
        return self.keys[layer]

    def value_deviation(self, layer: int) -> Floats:
        return self.values[layer]

    def query_attention(self, layer: int) -> Floats:
        return self.queries[layer]

    def auxiliary_attention(self) -> Floats:
        assert self.auxiliary is not None
        return self.auxiliary

    def written_attention(self) -> WrittenAttention:
        assert self.written is not None
        return self.written

    def output_kl(self, positions: Positions) -> float:
        return self.kl[tuple(positions.tolist())]


@dataclass(frozen=True)
class EverySignal:
    """Every signal, made of one value a token, different for each layer and head; and the names of those asked for.

    Where a value is not a number, so is what is made of it.
    """

    values: Floats
    positions: Positions
    segments: Sequence[SegmentView]
    asked: list[Need] = field(default_factory=list)

    def deviation(self) -> Floats:
        self.asked.append("deviation")
        return self.values

    def key_deviation(self, layer: int) -> Floats:
        self.asked.append("key-deviation")
        return np.roll(self.values, layer)

    def value_deviation(self, layer: int) -> Floats:
        self.asked.append("value-deviation")
        return np.roll(self.values, layer + 1)

    def query_attention(self, layer: int) -> Floats:
        self.asked.append("query-attention")
        return np.stack((np.roll(self.values, layer), self.values[::-1]))

    def auxiliary_attention(self) -> Floats:
        self.asked.append("auxiliary-attention")
        return np.stack((self.values, np.roll(self.values, 1), self.values[::-1]))

    def written_attention(self) -> WrittenAttention:
        self.asked.append("written-attention")
        chunks: list[ChunkAttention | None] = []
        for index, segment in enumerate(self.segments):
            inside = self.values[(segment.start <= self.positions) & (self.positions < segment.end)]
            over = {
                other.content_id: float(inside[:1].sum()) / (1 + i) for i, other in enumerate(self.segments[:index])
            }
            chunks.append(ChunkAttention(float(inside.sum()), over) if segment.hit else None)
        return WrittenAttention(self.values, tuple(chunks))

    def output_kl(self, positions: Positions) -> float:
        self.asked.append("output-kl")
        assert np.array_equal(positions, np.unique(positions)), "positions are ascending and distinct"
        return float(self.values[~np.isin(self.positions, positions)].sum(dtype=np.float64))


DEVIATION: frozenset[Need] = frozenset({"deviation"})


def context_of(
    layout: str,
    deviation: Sequence[float],
    k: int,
    holes: Iterable[int] = (),
    seed: int = 0,
    needs: frozenset[Need] = DEVIATION,
    **signals: object,
) -> SelectionContext:
    """A trailing "-" marks a segment that is not reusable; `holes` are single positions that are not either.

    `deviation` holds one value per reusable token; `signals` are the other fields of `FixedSignals`.
    """
    segments, positions, holes = [], [], set(holes)
    for index, piece in enumerate(pieces(layout)):
        over = tuple(segment.content_id for segment in segments)
        written = Written("request-0", "request", index, piece.start, "then", "now", over) if piece.is_hit else None
        segments.append(SegmentView(piece.kind, piece.word, piece.start, piece.end, piece.is_hit, written))
        positions += _without(range(piece.start, piece.end), holes) if piece.is_reusable else ()
    values = np.array(deviation, dtype=np.float32)
    assert len(values) == len(positions), f"{layout} has {len(positions)} reusable tokens, not {len(values)}"
    return SelectionContext(
        policy="policy",
        request_id="request-1",
        layer=1,
        layers=2,
        k=k,
        positions=np.array(positions, dtype=np.int64),
        token_ids=np.arange(segments[-1].end),
        segments=segments,
        rng=np.random.default_rng(seed),
        needs=needs,
        signals=FixedSignals(values, **signals),  # type: ignore[arg-type]
    )


def _without(positions: Iterable[int], holes: set[int]) -> list[int]:
    return [position for position in positions if position not in holes]


def for_policy(policy: Policy, context: SelectionContext) -> SelectionContext:
    """The context as this policy gets it: its needs, and every signal made of the context's deviation."""
    signals = EverySignal(context.signals.deviation(), context.positions, context.segments)
    return replace(context, policy=policy.name, needs=policy.needs, signals=signals)


EXACT = st.integers(0, 12).map(lambda eighths: eighths / 8)
"""Deviations whose sums are exact, with many ties."""


@st.composite
def contexts(draw: st.DrawFn, values: st.SearchStrategy[float] = EXACT) -> SelectionContext:
    """Random layouts, all kinds, with missed segments and holes, at least one token reusable, any k from 0 to N."""
    words = draw(
        st.lists(
            st.tuples(st.sampled_from("iddddmtqssg"), st.integers(1, 6), st.sampled_from(["", "", "", "-"])),
            min_size=1,
            max_size=7,
        ).filter(lambda drawn: any(not missed for *_, missed in drawn))
    )
    layout = " ".join(f"{kind}{length}{missed}" for kind, length, missed in words)
    reusable = [position for piece in pieces(layout) if piece.is_reusable for position in range(piece.start, piece.end)]
    holes = draw(st.sets(st.sampled_from(reusable), max_size=len(reusable) - 1))
    count = len(reusable) - len(holes)
    deviation = draw(st.lists(values, min_size=count, max_size=count))
    return context_of(layout, deviation, draw(st.integers(0, count)), holes, draw(st.integers(0, 2**16)))
