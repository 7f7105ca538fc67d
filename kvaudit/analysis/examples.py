"""The requests that show the damage best: every answer they got, and whose cached KV the damaged one was made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from kvaudit.analysis.compare import DIFFERENT, EQUAL, NO_ROW, Grid, Pair
from kvaudit.analysis.figures import variation_by_request

PER_POLICY = 3

ProvenanceOf = Callable[[Sequence[str], Sequence[str]], pa.Table]
"""(arm ids, request ids) to the rows of the `provenance` table that belong to them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer other than full prefill's, and the orders that gave it. `edit_distance` is from full prefill's;
    `margin` and `first_difference` (token index) as observed in the first of these orders."""

    text: str | None
    orders: tuple[str, ...]
    edit_distance: int | None
    first_difference: int | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class Origin:
    """A reused segment in the damaged arm: who wrote its KV, and who wrote what the other arm reused (None: it
    reused nothing there). `same_context`: the tokens before it are those that it was computed over."""

    segment: int
    content_id: str
    writer: str
    writer_part: str
    other_writer: str | None
    other_writer_part: str | None
    old_position: int
    new_position: int
    same_context: bool


@dataclass(frozen=True, slots=True)
class Example:
    """One request under one policy. `agreeing`: the orders that answered like full prefill. `arms`: the damaged
    arm and the one whose origins it is held against (None where no other arm answered otherwise)."""

    policy: str
    request_id: str
    differing_pairs: int
    compared_pairs: int
    reference_text: str | None
    agreeing: tuple[str, ...]
    answers: tuple[Answer, ...]
    arms: tuple[str, str | None]
    origins: tuple[Origin, ...] = ()


def worst_requests(grid: Grid, pairs: Sequence[Pair], provenance: ProvenanceOf | None = None) -> tuple[Example, ...]:
    """Per policy the requests with the largest share of differing order pairs, then with the most orders that leave
    full prefill, then with the largest edit distance, then the earliest."""
    examples: list[Example] = []
    for policy in grid.policies:
        references = {
            pair.right: pair for pair in pairs if pair.kind == "reference" and pair.right in grid.find(policy)
        }
        ranked = _ranked(grid, pairs, policy, list(references.values()))
        examples += [_example(grid, pairs, policy, references, request) for request in ranked]
    return tuple(examples) if provenance is None else _with_origins(examples, provenance)


def _ranked(grid: Grid, pairs: Sequence[Pair], policy: str, references: Sequence[Pair]) -> list[int]:
    if not references:
        return []
    variation = np.nan_to_num(variation_by_request(grid, pairs, policy))
    wrong = np.zeros(len(variation), np.int64)
    distance = np.zeros(len(variation), np.int64)
    for pair in references:
        wrong += pair.differs
        distance = np.maximum(distance, pair.distance)
    ranking = np.lexsort((-distance, -wrong, -variation))[:PER_POLICY]
    return [int(index) for index in ranking if variation[index] > 0 or wrong[index] > 0]


def _example(grid: Grid, pairs: Sequence[Pair], policy: str, references: Mapping[int, Pair], request: int) -> Example:
    mine = [pair for pair in pairs if pair.kind == "orders" and pair.policy == policy]
    agreeing = [arm for arm, pair in references.items() if pair.agreement[request] == EQUAL]
    others = _other_answers(grid, references, request)
    ranked = sorted(others, key=lambda arms: -int(references[arms[0]].distance[request]))
    damaged = ranked[0][0]
    against = agreeing[0] if agreeing else ranked[1][0] if len(ranked) > 1 else None
    return Example(
        policy=policy,
        request_id=grid.request_ids[request].as_py(),
        differing_pairs=sum(int(pair.agreement[request] == DIFFERENT) for pair in mine),
        compared_pairs=sum(int(pair.comparable[request]) for pair in mine),
        reference_text=None if grid.reference is None else grid.text(grid.reference, request),
        agreeing=tuple(grid.arms[arm].order for arm in agreeing),
        answers=tuple(_answer(grid, arms, references[arms[0]], request) for arms in ranked),
        arms=(grid.arms[damaged].arm_id, None if against is None else grid.arms[against].arm_id),
    )


def _other_answers(grid: Grid, references: Mapping[int, Pair], request: int) -> list[list[int]]:
    """Arms whose answer is not full prefill's, grouped by equal answers."""
    groups: dict[tuple[int, int], list[int]] = {}
    for arm, pair in references.items():
        row = grid.rows[arm, request]
        if row == NO_ROW or grid.failed[row] or pair.agreement[request] == EQUAL:
            continue
        groups.setdefault((int(grid.id_codes[row]), int(grid.text_codes[row])), []).append(arm)
    return list(groups.values())


def _answer(grid: Grid, arms: Sequence[int], pair: Pair, request: int) -> Answer:
    row = grid.observations.slice(int(grid.rows[arms[0], request]), 1)
    distance = int(pair.distance[request])
    return Answer(
        text=grid.text(arms[0], request),
        orders=tuple(grid.arms[arm].order for arm in arms),
        edit_distance=distance if distance >= 0 else None,
        first_difference=row["first_difference"][0].as_py(),
        margin=row["margin"][0].as_py(),
    )


def _with_origins(examples: Sequence[Example], provenance: ProvenanceOf) -> tuple[Example, ...]:
    arms = dict.fromkeys(arm for example in examples for arm in example.arms if arm is not None)
    if not examples:
        return ()
    found: dict[tuple[str, str], dict[int, dict[str, object]]] = {}
    rows = provenance(tuple(arms), tuple(dict.fromkeys(example.request_id for example in examples)))
    for row in rows.to_pylist():
        found.setdefault((row["arm_id"], row["request_id"]), {})[row["segment"]] = row
    return tuple(replace(example, origins=_origins(example, found)) for example in examples)


def _origins(
    example: Example, found: Mapping[tuple[str, str], Mapping[int, Mapping[str, object]]]
) -> tuple[Origin, ...]:
    damaged, against = example.arms
    mine = found.get((damaged, example.request_id), {})
    other = found.get((against, example.request_id), {}) if against is not None else {}
    return tuple(_origin(mine[segment], other.get(segment)) for segment in sorted(mine))


def _origin(row: Mapping[str, object], other: Mapping[str, object] | None) -> Origin:
    values = {
        "segment": row["segment"],
        "content_id": row["content_id"],
        "writer": row["writer_request_id"],
        "writer_part": row["writer_part"],
        "other_writer": None if other is None else other["writer_request_id"],
        "other_writer_part": None if other is None else other["writer_part"],
        "old_position": row["old_position"],
        "new_position": row["new_position"],
        "same_context": row["context_hash_written"] == row["context_hash_now"],
    }
    return Origin(**values)  # type: ignore[arg-type]
