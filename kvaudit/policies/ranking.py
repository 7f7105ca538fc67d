"""What policies share to rank tokens and spans and to take exactly k of them.

A span is a range [start, end) of indices into the request's reusable tokens, so that neighbours are neighbouring
*reusable* tokens; spans are int64 [S, 2] and none is empty. A value that is not a number ranks below every other, and
counts as 0 in a sum or mean. Among equals the lower position comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvaudit.policies import Positions, SegmentView, SelectionContext
from kvaudit.records import GAP_KINDS, runs

Indices = NDArray[np.int64]
Spans = NDArray[np.int64]
Doubles = NDArray[np.float64]
Numbers = NDArray[np.floating]


def numbers(signal: Numbers) -> Doubles:
    """The signal as a float64 copy, 0 where it is not a number."""
    return np.where(np.isnan(signal), 0.0, signal.astype(np.float64))


def top_k(signal: Numbers, k: int) -> Indices:
    """Indices of the k largest values [n], in no order. 0 <= k <= n. Time is linear in n."""
    if not k:
        return np.empty(0, dtype=np.int64)
    known = np.where(np.isnan(signal), -np.inf, signal)
    smallest_chosen = np.partition(known, -k)[-k]
    above = np.flatnonzero(known > smallest_chosen)
    level = np.flatnonzero(known == smallest_chosen)
    if np.isneginf(smallest_chosen):
        level = level[np.argsort(np.isnan(signal[level]), kind="stable")]
    return np.concatenate((above, level[: k - len(above)]))


def by_mean(spans: Spans, signal: Numbers) -> Spans:
    """The spans by the mean of their tokens' values (paper 2.3, equation 3), those without any number last."""
    if not len(spans):
        return spans
    lengths = spans[:, 1] - spans[:, 0]
    means = _sums(spans, numbers(signal)) / lengths
    means[_sums(spans, np.isnan(signal).astype(np.float64)) == lengths] = -np.inf
    return spans[np.argsort(-means, kind="stable")]


def fill(context: SelectionContext, ranked: Spans, signal: Numbers) -> Positions:
    """Positions [k] of `ranked` spans, which hold k tokens or more, taken as `filled` takes them."""
    return context.positions[filled(ranked, signal, context.k)]


def filled(ranked: Spans, signal: Numbers, k: int) -> Indices:
    """Indices of whole spans in rank order while they fit; what is left of k is the window with the largest sum in
    the first span that does not. All of the spans where they hold fewer than k tokens."""
    whole, chosen = whole_spans(ranked, k)
    left = k - len(chosen)
    if not left or whole == len(ranked):
        return chosen
    start, end = ranked[whole]
    start += best_window(numbers(signal[start:end]), left)
    return np.concatenate((chosen, np.arange(start, start + left)))


def whole_spans(ranked: Spans, k: int) -> tuple[int, Indices]:
    """How many spans fit into k, in rank order up to the first that does not, and their indices."""
    lengths = ranked[:, 1] - ranked[:, 0]
    ends = np.cumsum(lengths)
    whole = int(np.searchsorted(ends, k, side="right"))
    return whole, _enumerated(ranked[:whole, 0], lengths[:whole])


def best_window(signal: Doubles, length: int) -> int:
    """Where the window of `length` values with the largest sum starts, the first such window on ties.

    signal: float64 [n], not NaN; 1 <= length <= n. A window is the tail of one block of `length` values and the
    head of the next: nothing is subtracted, so that a large or infinite value spoils no window that it is not in.
    """
    padded = np.zeros(-(-len(signal) // length) * length)
    padded[: len(signal)] = signal
    blocks = padded.reshape(-1, length)
    heads = np.cumsum(blocks, axis=1).ravel()
    tails = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    starts = np.arange(len(signal) - length + 1)
    return int(np.argmax(tails[starts] + np.where(starts % length, heads[starts + length - 1], 0.0)))


def segment_spans(segments: Sequence[SegmentView], positions: Positions) -> Spans:
    """int64 [segments, 2]: each segment's range of indices into its reusable tokens; empty where it has none."""
    borders = np.array([(segment.start, segment.end) for segment in segments], dtype=np.int64).reshape(-1, 2)
    return np.searchsorted(positions, borders).astype(np.int64)


def document_spans(context: SelectionContext) -> tuple[Spans, Spans]:
    """Spans of chunks, cut to their reusable tokens, and runs of the reusable tokens in none (zeroed separators)."""
    of_segment = segment_spans(context.segments, context.positions)
    is_chunk = np.array([segment.kind not in GAP_KINDS for segment in context.segments], dtype=bool)
    chunks = of_segment[is_chunk & (of_segment[:, 0] < of_segment[:, 1])]
    outside = np.ones(len(context.positions), dtype=bool)
    outside[_enumerated(chunks[:, 0], chunks[:, 1] - chunks[:, 0])] = False
    rest = np.array(list(runs(context.positions[outside].tolist())), dtype=np.int64).reshape(-1, 2)
    return chunks, np.searchsorted(context.positions, rest).astype(np.int64)


def tiles(context: SelectionContext, length: int) -> Spans:
    """`document_spans` of both kinds cut into pieces of `length` tokens, the last of each span shorter, by position.

    No piece lies across the border of a chunk. length 0: the spans as they are.
    """
    spans = np.concatenate(document_spans(context))
    spans = spans[np.argsort(spans[:, 0])]
    if not length:
        return spans
    pieces = -(-(spans[:, 1] - spans[:, 0]) // length)
    of_piece = np.repeat(np.arange(len(spans)), pieces)
    starts = spans[of_piece, 0] + length * _enumerated(np.zeros_like(pieces), pieces)
    return np.stack((starts, np.minimum(starts + length, spans[of_piece, 1])), axis=1)


def apportion(total: int, weights: Doubles, capacities: Indices) -> Indices:
    """int64 [n]: whole numbers in proportion to the weights and at most their capacities, by largest remainder.

    They sum to `total`, or to the capacity of all with a positive weight where that is less. What one cannot hold goes
    to the others, in proportion again.
    """
    shares = np.zeros(len(weights), dtype=np.int64)
    unfilled = (weights > 0) & (capacities > 0)
    left = min(total, int(capacities[unfilled].sum()))
    while left:
        quotas = np.where(unfilled, left * (weights / weights[unfilled].sum()), 0.0)
        full = unfilled & (quotas >= capacities)
        if not full.any():
            shares[unfilled] = quotas[unfilled]
            by_remainder = np.argsort(shares - quotas, kind="stable")
            shares[by_remainder[unfilled[by_remainder]][: left - int(shares[unfilled].sum())]] += 1
            break
        shares[full] = capacities[full]
        left -= int(capacities[full].sum())
        unfilled &= ~full
    return shares


def _sums(spans: Spans, values: Doubles) -> Doubles:
    sums: Doubles = np.add.reduceat(np.append(values, 0.0), spans.ravel())[::2]
    return sums


def _enumerated(starts: Indices, lengths: Indices) -> Indices:
    """The ranges [start, start + length) one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
