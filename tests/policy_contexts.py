"""Selection contexts in a mini-language: "i3 d4 s1 d4- q2" is an instruction of 3 tokens, a document of 4, ..."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from kvaudit.policies import Floats, Need, Positions, SegmentView, SelectionContext, WrittenAttention

KINDS = {
    "i": "instruction",
    "d": "document",
    "m": "message",
    "t": "tool-result",
    "q": "query",
    "s": "separator",
    "g": "glue",
}


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
    segments, positions, start, holes = [], [], 0, set(holes)
    for word in layout.split():
        end = start + int(word[1:].rstrip("-"))
        hit = not word.endswith("-")
        segments.append(SegmentView(KINDS[word[0]], word, start, end, hit and word[0] not in "sg"))
        positions += [position for position in range(start, end) if hit and position not in holes]
        start = end
    values = np.array(deviation, dtype=np.float32)
    assert len(values) == len(positions), f"{layout} has {len(positions)} reusable tokens, not {len(values)}"
    return SelectionContext(
        policy="policy",
        request_id="request-1",
        layer=1,
        layers=2,
        k=k,
        positions=np.array(positions, dtype=np.int64),
        token_ids=np.arange(start),
        segments=segments,
        rng=np.random.default_rng(seed),
        needs=needs,
        signals=FixedSignals(values, **signals),  # type: ignore[arg-type]
    )


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
    reusable, start = [], 0
    for _, length, missed in words:
        reusable += [] if missed else range(start, start + length)
        start += length
    holes = draw(st.sets(st.sampled_from(reusable), max_size=len(reusable) - 1))
    count = len(reusable) - len(holes)
    deviation = draw(st.lists(values, min_size=count, max_size=count))
    return context_of(layout, deviation, draw(st.integers(0, count)), holes, draw(st.integers(0, 2**16)))
