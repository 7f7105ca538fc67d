"""Observations to comparisons: which answers are equal, token for token, and how far apart the others are.

Column-wise: every answer gets an integer code once, arms are compared as arrays of codes (one entry a request),
and an edit distance is computed once per distinct pair of different answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any, Literal, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvaudit.errors import RunError
from kvaudit.records import CHRONOLOGICAL, FULL_PREFILL
from kvaudit.schema import TABLES

Kind = Literal["reference", "orders", "repeat", "rounding", "noise"]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

EQUAL, DIFFERENT, NOT_COMPARABLE = 1, 0, -1
NO_ROW = -1
UNKNOWN_DISTANCE = -1
LONGEST_EDIT = 2_000_000_000
"""Largest product of two answers' lengths for which an edit distance is computed (about 0.1 s); null above it."""


class PlannedArm(Protocol):
    """An arm as the run folder's manifest plans it; `finished` when all of its observations are there."""

    @property
    def arm_id(self) -> str: ...
    @property
    def policy(self) -> str: ...
    @property
    def order(self) -> str: ...
    @property
    def control(self) -> str: ...
    @property
    def order_seed(self) -> int | None: ...
    @property
    def finished(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Grid:
    """A run's observations as arms x requests. A arms as planned, R requests in the order in which they came.

    expected: the right answers [R], null where the trace knows none.
    observations: the numeric columns of that table.
    rows: int64 [A, R], the observation's row in `observations`, -1 where there is none.
    failed: bool [rows], observations with an error or without an answer: they are not comparable.
    empty: bool [rows], answers without a character (without a token, where the engine gives no text).
    id_codes, text_codes: int64 [rows], equal codes mean equal token ids and equal texts, -1 where the observation has
    none; `agreement` says which answers are equal.
    texts: the distinct answer texts that `text_codes` point into.
    errors: string [rows], the engine's error, null where there is none.
    duplicates: int64 [A], observations of a request that the arm had already (the first one counts).
    strays: observations of an arm or a request that the run did not plan.
    restarted: whether what answers was started anew for every arm: noise may then be a whole run's.
    """

    arms: tuple[PlannedArm, ...]
    request_ids: pa.Array
    expected: pa.Array
    observations: pa.Table
    rows: Integers
    failed: Flags
    empty: Flags
    id_codes: Integers
    text_codes: Integers
    texts: pa.Array
    errors: pa.ChunkedArray
    duplicates: Integers
    strays: int
    restarted: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        """The audited policies, as planned: all but full prefill."""
        return tuple(dict.fromkeys(arm.policy for arm in self.arms if arm.policy != FULL_PREFILL))

    def find(self, policy: str, control: str = "none", order: str | None = None) -> tuple[int, ...]:
        """Indices of the arms of a policy under a control, in planned order."""
        return tuple(
            index
            for index, arm in enumerate(self.arms)
            if arm.policy == policy and arm.control == control and order in (None, arm.order)
        )

    @property
    def reference(self) -> int | None:
        """The arm whose answers are the reference: full prefill in chronological order."""
        return next(iter(self.find(FULL_PREFILL, order=CHRONOLOGICAL)), None)

    def column(self, name: str, arm: int) -> NDArray[np.float64]:
        """A numeric column for one arm: float64 [R], NaN where it is null or the observation is missing."""
        return self.columns((name,), arm)[name]

    def columns(self, names: Sequence[str], arm: int) -> dict[str, NDArray[np.float64]]:
        rows = self.rows[arm]
        taken = self.observations.select(list(names)).take(pa.array(rows, mask=rows == NO_ROW))
        return {name: _floats(taken[name]) for name in names}

    def cold(self, arm: int) -> Flags:
        """The requests of an arm that say that nothing was cached of them: each of them is full prefill."""
        columns = self.columns(("reused_tokens", "reusable_tokens"), arm)
        reusable = columns["reusable_tokens"]
        cold: Flags = (columns["reused_tokens"] == 0) & ((reusable == 0) | np.isnan(reusable))
        return cold

    def reuses_nothing(self, arm: int) -> bool:
        """Whether an arm is full prefill throughout."""
        return bool(self.cold(arm).all())

    def text(self, arm: int, request: int) -> str | None:
        """An answer's text, None where there is none."""
        row = self.rows[arm, request]
        code = self.text_codes[row] if row != NO_ROW else -1
        return cast(str, self.texts[int(code)].as_py()) if code >= 0 else None

    def error(self, arm: int, request: int) -> str | None:
        """The engine's error on a request, None where there is none."""
        row = self.rows[arm, request]
        return cast("str | None", self.errors[int(row)].as_py()) if row != NO_ROW else None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two arms held against each other, request by request.

    agreement: int8 [R], 1 equal, 0 different, -1 not comparable.
    distance: int64 [R], edit distance in characters, 0 where equal, -1 where unknown.
    """

    kind: Kind
    policy: str
    left: int
    right: int
    agreement: NDArray[np.int8]
    distance: Integers

    @property
    def comparable(self) -> Flags:
        return np.not_equal(self.agreement, NOT_COMPARABLE)

    @property
    def differs(self) -> Flags:
        return np.equal(self.agreement, DIFFERENT)


def build_grid(
    observations: pa.Table, requests: pa.Table, arms: Sequence[PlannedArm], *, restarted: bool = False
) -> Grid:
    """Arrange observations by arm and request. Raises RunError when a table lacks a column or has the wrong type."""
    observations = conformed(observations, "observations")
    stream = conformed(requests, "requests").select(["request_id", "ordinal", "expected"]).sort_by("ordinal")
    request_ids = stream["request_id"].combine_chunks()
    arm_at = _positions(observations["arm_id"], pa.array([arm.arm_id for arm in arms], pa.string()))
    request_at = _positions(observations["request_id"], request_ids)
    planned = np.flatnonzero((arm_at >= 0) & (request_at >= 0))
    cells = arm_at[planned] * len(request_ids) + request_at[planned]
    first_cells, first = np.unique(cells, return_index=True)
    rows = np.full(len(arms) * len(request_ids), NO_ROW, np.int64)
    rows[first_cells] = planned[first]
    seen = np.bincount(arm_at[planned], minlength=len(arms))
    kept = np.bincount(first_cells // max(1, len(request_ids)), minlength=len(arms))
    id_codes = list_codes(observations["answer_ids"])
    text_codes, texts = _text_codes(observations["answer_text"])
    failed = _flags(pc.is_valid(observations["error"])) | ((id_codes < 0) & (text_codes < 0))
    return Grid(
        arms=tuple(arms),
        request_ids=request_ids,
        expected=stream["expected"].combine_chunks(),
        observations=_numeric(observations),
        rows=rows.reshape(len(arms), len(request_ids)),
        failed=failed,
        empty=~failed & _are_empty(observations),
        id_codes=id_codes,
        text_codes=text_codes,
        texts=texts,
        errors=observations["error"],
        duplicates=(seen - kept).astype(np.int64),
        strays=len(observations) - len(planned),
        restarted=restarted,
    )


def compare(grid: Grid) -> tuple[Pair, ...]:
    """Every comparison that an audit makes: with the reference, between orders, with repeat and rounding control, noise
    floor."""
    planned = list(_planned_pairs(grid))
    agreements = [agreement(grid, left, right) for _, _, left, right in planned]
    distances = _distances(grid, planned, agreements)
    return tuple(
        Pair(kind, policy, left, right, agreement, distance)
        for (kind, policy, left, right), agreement, distance in zip(planned, agreements, distances, strict=True)
    )


def agreement(grid: Grid, left: int, right: int) -> NDArray[np.int8]:
    """Which answers of two arms are equal: int8 [R], 1 equal, 0 different, -1 not comparable.

    Equal are answers with the same token ids and, where both have one, the same text (a stop string can begin inside
    a token: the ids end alike there, the texts do not). Where a side has no token ids, the texts alone decide.
    """
    a, b = grid.rows[left], grid.rows[right]
    found = np.full(len(a), NOT_COMPARABLE, np.int8)
    both = np.flatnonzero((a != NO_ROW) & (b != NO_ROW))
    both = both[~(grid.failed[a[both]] | grid.failed[b[both]])]
    a, b = a[both], b[both]
    by_ids = (grid.id_codes[a] >= 0) & (grid.id_codes[b] >= 0)
    by_text = (grid.text_codes[a] >= 0) & (grid.text_codes[b] >= 0)
    differ = by_ids & (grid.id_codes[a] != grid.id_codes[b]) | by_text & (grid.text_codes[a] != grid.text_codes[b])
    found[both] = np.where(by_ids | by_text, ~differ, NOT_COMPARABLE)
    return found


def comparisons_table(grid: Grid, pairs: Sequence[Pair]) -> pa.Table:
    """The `comparisons` table: a row per comparable request of every pair."""

    # Constant columns share their buffers between pairs: at millions of rows this is most of the table.
    @cache
    def repeated(value: str, count: int) -> pa.Array:
        return pa.repeat(pa.scalar(value), count)

    batches = []
    for pair in pairs:
        kept = np.flatnonzero(pair.comparable)
        distance = pair.distance[kept]
        columns = [
            repeated(pair.kind, len(kept)),
            repeated(pair.policy, len(kept)),
            grid.request_ids if len(kept) == len(grid.request_ids) else grid.request_ids.take(pa.array(kept)),
            repeated(grid.arms[pair.left].arm_id, len(kept)),
            repeated(grid.arms[pair.right].arm_id, len(kept)),
            pa.array(pair.agreement[kept] == EQUAL),
            pa.array(distance, mask=distance == UNKNOWN_DISTANCE),
        ]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=TABLES["comparisons"]))
    return pa.Table.from_batches(batches, TABLES["comparisons"])


def conformed(table: pa.Table, name: str) -> pa.Table:
    """The columns of a table that its schema names, with the schema's types; RunError when they are not there."""
    schema = TABLES[name]
    missing = [column for column in schema.names if column not in table.column_names]
    if missing:
        raise RunError(f"the table {name!r} has no column {missing[0]!r}", "the run is not one of this version's")
    try:
        return table.select(schema.names).cast(pa.schema([field.with_nullable(True) for field in schema]))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise RunError(f"the table {name!r} does not have this version's column types: {error}") from error


def _numeric(table: pa.Table) -> pa.Table:
    return table.select([field.name for field in table.schema if field.type in (pa.int64(), pa.float64())])


def _positions(values: pa.ChunkedArray, among: pa.Array) -> Integers:
    return cast(Integers, pc.fill_null(pc.index_in(values, value_set=among), -1).to_numpy().astype(np.int64))


def _floats(column: pa.ChunkedArray) -> NDArray[np.float64]:
    return cast("NDArray[np.float64]", column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def _flags(column: pa.ChunkedArray) -> Flags:
    return cast(Flags, column.to_numpy(zero_copy_only=False))


def list_codes(column: pa.ChunkedArray) -> Integers:
    """Codes of lists of int32, by their bytes, -1 where null: Arrow has no dictionary of lists."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    tokens = pc.fill_null(pc.list_flatten(column), -1).to_numpy().astype(np.int32, copy=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]) * tokens.itemsize
    packed = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(tokens))]
    )
    codes = packed.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    codes[_flags(pc.is_null(column))] = -1
    return cast(Integers, codes)


def _text_codes(column: pa.ChunkedArray) -> tuple[Integers, pa.Array]:
    encoded = column.cast(pa.large_string()).combine_chunks().dictionary_encode()
    return pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary


def _are_empty(observations: pa.Table) -> Flags:
    no_text = pc.equal(pc.utf8_length(observations["answer_text"].cast(pa.large_string())), 0)
    no_ids = pc.equal(pc.list_value_length(observations["answer_ids"]), 0)
    return _flags(pc.fill_null(pc.coalesce(no_text, no_ids), False))


def _planned_pairs(grid: Grid) -> Iterator[tuple[Kind, str, int, int]]:
    reference = grid.reference
    if reference is not None:
        for index, arm in enumerate(grid.arms):
            if arm.policy != FULL_PREFILL:
                yield "reference", arm.policy, reference, index
    for policy in grid.policies:
        for left, right in combinations(grid.find(policy), 2):
            yield "orders", policy, left, right
    for index, arm in enumerate(grid.arms):
        for original in grid.find(arm.policy, order=arm.order):
            if arm.control == "repeat":
                yield "noise" if arm.policy == FULL_PREFILL else "repeat", arm.policy, original, index
            elif arm.control == "rounding":
                yield "rounding", arm.policy, original, index


def _distances(
    grid: Grid, planned: Sequence[tuple[Kind, str, int, int]], agreements: Sequence[NDArray[np.int8]]
) -> list[Integers]:
    """Edit distances over the answer texts, each distinct pair of texts measured once."""
    places = [np.flatnonzero(agreement == DIFFERENT) for agreement in agreements]
    codes = [
        np.sort(grid.text_codes[grid.rows[[left, right]][:, place]], axis=0)
        for (_, _, left, right), place in zip(planned, places, strict=True)
    ]
    keys = [low * (len(grid.texts) + 1) + high for low, high in codes]
    distinct, first, back = np.unique(
        np.concatenate([*keys, np.empty(0, np.int64)]), return_index=True, return_inverse=True
    )
    flat = np.concatenate([*codes, np.empty((2, 0), np.int64)], axis=1)
    measured = _edit_distances(grid.texts, *flat[:, first]) if len(distinct) else np.empty(0, np.int64)
    spread = np.split(measured[back], np.cumsum([len(place) for place in places])[:-1]) if places else []
    result = []
    for agreement, place, values in zip(agreements, places, spread, strict=True):
        distance = np.where(agreement == EQUAL, 0, UNKNOWN_DISTANCE).astype(np.int64)
        distance[place] = values
        result.append(distance)
    return result


def _edit_distances(texts: pa.Array, left: Integers, right: Integers) -> Integers:
    from rapidfuzz import process
    from rapidfuzz.distance import Levenshtein

    measured = np.full(len(left), UNKNOWN_DISTANCE, np.int64)
    lengths = pc.utf8_length(texts).to_numpy(zero_copy_only=False).astype(np.int64)
    known = np.flatnonzero((left >= 0) & (right >= 0))
    known = known[lengths[left[known]] * lengths[right[known]] <= LONGEST_EDIT]
    used, places = np.unique(np.concatenate([left[known], right[known]]), return_inverse=True)
    strings = np.array([*texts.take(pa.array(used)).to_pylist(), None], dtype=object)
    a, b = strings[places[: len(known)]], strings[places[len(known) :]]
    cdist: Any = process.cpdist
    measured[known] = cdist(list(a), list(b), scorer=Levenshtein.distance, dtype=np.int64)
    return measured
