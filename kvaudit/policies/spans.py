"""Policies that recompute contiguous spans (paper 2.3): one window, equal chunks, or whole documents.

A span is a range [start, end) of indices into the request's reusable tokens, so that neighbours are neighbouring
*reusable* tokens. A deviation that is not a number counts as 0, the smallest that a squared distance can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvaudit.policies import Policy, Positions, SelectionContext
from kvaudit.records import DOCUMENT, GAP_KINDS, runs

Span = tuple[int, int]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SingleWindow(Policy):
    """The k neighbouring reusable tokens with the largest summed deviation."""

    name: ClassVar[str] = "single-window"

    def select(self, context: SelectionContext) -> Positions:
        return _fill(context, [(0, len(context.positions))])


@dataclass(frozen=True, slots=True)
class FixedChunk(Policy):
    """Equal spans of reusable tokens across document borders, the largest mean deviation first.

    A span is as long as the median of the request's documents (of its other chunks where it has none). The first is
    half as long, so that the others lie across documents of that length.
    """

    name: ClassVar[str] = "fixed-chunk"

    def select(self, context: SelectionContext) -> Positions:
        length = _median_document_length(context)
        count = len(context.positions)
        borders = [0, *range(length // 2, count, length), count]
        spans = [(start, end) for start, end in pairwise(borders) if start < end]
        return _fill(context, _by_mean_deviation(spans, _deviation(context)))


@dataclass(frozen=True, slots=True)
class RandomDocument(Policy):
    """Whole documents, and the instruction and the query where they are reusable, in a seeded random order."""

    name: ClassVar[str] = "random-document"

    def select(self, context: SelectionContext) -> Positions:
        documents, rest = _document_spans(context)
        ranked = [group[i] for group in (documents, rest) for i in context.rng.permutation(len(group))]
        return _fill(context, ranked)


@dataclass(frozen=True, slots=True)
class DocumentAligned(Policy):
    """Whole documents, and the instruction and the query where they are reusable, the largest mean deviation first."""

    name: ClassVar[str] = "document-aligned"

    def select(self, context: SelectionContext) -> Positions:
        deviation = _deviation(context)
        documents, rest = _document_spans(context)
        return _fill(context, [*_by_mean_deviation(documents, deviation), *_by_mean_deviation(rest, deviation)])


def _fill(context: SelectionContext, ranked: Sequence[Span]) -> Positions:
    """Whole spans in rank order while they fit; what is left of k is the best window in the first that does not."""
    deviation = _deviation(context)
    chosen = [np.empty(0, dtype=np.int64)]
    left = context.k
    for start, end in ranked:
        if not left:
            break
        if end - start > left:
            start += best_window(deviation[start:end], left)
            end = start + left
        chosen.append(np.arange(start, end))
        left -= end - start
    return context.positions[np.concatenate(chosen)]


def best_window(deviation: Doubles, length: int) -> int:
    """Where the window of `length` values with the largest sum starts, the first such window on ties.

    deviation: float64 [n], not NaN; 1 <= length <= n. A window is the tail of one block of `length` values and the
    head of the next: nothing is subtracted, so that a large or infinite value spoils no window that it is not in.
    """
    padded = np.zeros(-(-len(deviation) // length) * length)
    padded[: len(deviation)] = deviation
    blocks = padded.reshape(-1, length)
    heads = np.cumsum(blocks, axis=1).ravel()
    tails = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    starts = np.arange(len(deviation) - length + 1)
    return int(np.argmax(tails[starts] + np.where(starts % length, heads[starts + length - 1], 0.0)))


def _document_spans(context: SelectionContext) -> tuple[list[Span], list[Span]]:
    """Spans of chunks, cut to their reusable tokens, and runs of the reusable tokens in none (zeroed separators)."""
    chunks = [(segment.start, segment.end) for segment in context.segments if segment.kind not in GAP_KINDS]
    documents = _indices(context, chunks)
    covered = np.zeros(len(context.positions), dtype=bool)
    for start, end in documents:
        covered[start:end] = True
    return documents, _indices(context, list(runs(context.positions[~covered].tolist())))


def _indices(context: SelectionContext, ranges: Sequence[tuple[int, int]]) -> list[Span]:
    borders = np.searchsorted(context.positions, np.array(ranges, dtype=np.int64).reshape(-1, 2))
    return [(start, end) for start, end in borders.tolist() if start < end]


def _by_mean_deviation(spans: Sequence[Span], deviation: Doubles) -> list[Span]:
    """The spans by rho_j, the mean deviation of their tokens (paper 2.3, equation 3), the earlier first on ties."""
    if not spans:
        return []
    borders = np.array(spans)
    sums = np.add.reduceat(np.append(deviation, 0.0), borders.ravel())[::2]
    means = sums / (borders[:, 1] - borders[:, 0])
    return [spans[i] for i in np.argsort(-means, kind="stable")]


def _median_document_length(context: SelectionContext) -> int:
    chunks = [segment for segment in context.segments if segment.kind not in GAP_KINDS]
    documents = [segment for segment in chunks if segment.kind == DOCUMENT] or chunks
    return max(1, median_low([segment.end - segment.start for segment in documents or context.segments]))


def _deviation(context: SelectionContext) -> Doubles:
    deviation = context.deviation.astype(np.float64)
    deviation[np.isnan(deviation)] = 0.0
    return deviation
