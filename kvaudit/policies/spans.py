"""Policies that recompute contiguous spans (paper 2.3): one window, equal chunks, or whole documents."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import ClassVar

import numpy as np

from kvaudit.policies import Policy, Positions, SelectionContext
from kvaudit.policies.ranking import by_mean, document_spans, fill
from kvaudit.records import DOCUMENT, GAP_KINDS


@dataclass(frozen=True, slots=True)
class SingleWindow(Policy):
    """The k neighbouring reusable tokens with the largest summed deviation."""

    name: ClassVar[str] = "single-window"

    def select(self, context: SelectionContext) -> Positions:
        return fill(context, np.array([[0, len(context.positions)]]), context.deviation)


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
        spans = np.array([(start, end) for start, end in pairwise(borders) if start < end])
        return fill(context, by_mean(spans, context.deviation), context.deviation)


@dataclass(frozen=True, slots=True)
class RandomDocument(Policy):
    """Whole documents, and the instruction and the query where they are reusable, in a seeded random order.

    Deviation places the window in the last document, which does not fit.
    """

    name: ClassVar[str] = "random-document"

    def select(self, context: SelectionContext) -> Positions:
        ranked = [group[context.rng.permutation(len(group))] for group in document_spans(context)]
        return fill(context, np.concatenate(ranked), context.deviation)


@dataclass(frozen=True, slots=True)
class DocumentAligned(Policy):
    """Whole documents, and the instruction and the query where they are reusable, the largest mean deviation first."""

    name: ClassVar[str] = "document-aligned"

    def select(self, context: SelectionContext) -> Positions:
        deviation = context.deviation
        ranked = [by_mean(group, deviation) for group in document_spans(context)]
        return fill(context, np.concatenate(ranked), deviation)


def _median_document_length(context: SelectionContext) -> int:
    chunks = [segment for segment in context.segments if segment.kind not in GAP_KINDS]
    documents = [segment for segment in chunks if segment.kind == DOCUMENT] or chunks
    return max(1, median_low([segment.end - segment.start for segment in documents or context.segments]))
