"""Runs in a mini-language: one line an arm, one word an answer.

    full-prefill chronological        : a b c
    full-prefill chronological repeat : a b c
    token-topk   reversed             : a ! -

`!` is an error, `-` no observation, `_` an empty answer; any other word is looked up in `texts`, else is the answer
itself. Equal words get equal token ids. Requests are r0, r1, ... in the order in which they came.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import pyarrow as pa

from kvaudit.schema import TABLES

Columns = Callable[["PlannedArm", int], Mapping[str, Any]]


@dataclass(frozen=True)
class PlannedArm:
    arm_id: str
    policy: str
    order: str
    control: str
    finished: bool = True
    order_seed: int | None = None


@dataclass(frozen=True)
class BuiltRun:
    """A run in memory, with what kvaudit.analysis.audit.RunTables asks for."""

    planned: tuple[PlannedArm, ...]
    tables: dict[str, pa.Table]
    manifest: dict[str, Any] = field(default_factory=dict)

    def arms(self) -> tuple[PlannedArm, ...]:
        return self.planned

    def table(self, name: str) -> pa.Table:
        return self.tables.get(name, TABLES[name].empty_table())

    def provenance(self, arm_ids: Sequence[str], request_ids: Sequence[str]) -> pa.Table:
        rows = self.table("provenance").to_pylist()
        wanted = [row for row in rows if row["arm_id"] in arm_ids and row["request_id"] in request_ids]
        return pa.Table.from_pylist(wanted, TABLES["provenance"])

    def unfinished(self, *arm_ids: str) -> BuiltRun:
        """The same run before these arms finished."""
        planned = tuple(replace(arm, finished=arm.arm_id not in arm_ids) for arm in self.planned)
        rows = [row for row in self.table("observations").to_pylist() if row["arm_id"] not in arm_ids]
        return replace(self, planned=planned, tables={**self.tables, "observations": observations(rows)})

    def with_rows(self, edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> BuiltRun:
        """The same run with every observation passed through `edit`; None takes it out."""
        rows = [edited for row in self.table("observations").to_pylist() if (edited := edit(row)) is not None]
        return replace(self, tables={**self.tables, "observations": observations(rows)})


def observations(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), TABLES["observations"])


def arm(policy: str, order: str = "chronological", control: str = "none") -> PlannedArm:
    suffix = "" if control == "none" else f".{control}"
    return PlannedArm(f"{policy}.{order}{suffix}", policy, order, control)


def run(
    text: str,
    *,
    texts: Mapping[str, str] | None = None,
    columns: Columns | None = None,
    expected: Sequence[str | None] | None = None,
    documents: Sequence[Sequence[str]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> BuiltRun:
    lines = [line.split(":", 1) for line in text.strip().splitlines() if line.strip()]
    answers = {arm(*head.split()): words.split() for head, words in lines}
    count = max(len(words) for words in answers.values())
    rows = [
        _row(planned, index, word, count, texts or {}) | dict(columns(planned, index) if columns else {})
        for planned, words in answers.items()
        for index, word in enumerate(words)
        if word != "-"
    ]
    requests = [
        {
            "request_id": f"r{index}",
            "ordinal": index,
            "prompt_tokens": 100,
            "segments": [
                {"kind": "document", "content_id": name, "start": place, "end": place + 1}
                for place, name in enumerate(documents[index] if documents else ())
            ],
            "expected": expected[index] if expected else None,
        }
        for index in range(count)
    ]
    return BuiltRun(
        tuple(answers),
        {"observations": observations(rows), "requests": pa.Table.from_pylist(requests, TABLES["requests"])},
        {
            "schema_version": 1,
            "trace": {"source": "trace.jsonl", "digest": "d1" * 32, "requests": count},
            "engine": {"name": "embedded", "device": "cpu"},
            "settings": dict(settings or {"model": "tiny", "seed": 0, "switches": {"mask": "exact", "gap": "zero"}}),
        },
    )


def arm_lines(policy: str, orders: Mapping[str, str], reset: str, repeat: str) -> str:
    """The lines of one policy: its orders, then both controls."""
    lines = [f"{policy} {order} : {words}" for order, words in orders.items()]
    return "\n".join([*lines, f"{policy} chronological reset : {reset}", f"{policy} chronological repeat : {repeat}"])


def rounded(*touched: str) -> Columns:
    """Columns of a policy that ranks by signals: in these arms rounding decided a selection of every request."""
    return lambda planned, index: {"rounding_tokens": 2 if planned.arm_id in touched else 0}


def full_prefill(words: str, again: str | None = None) -> str:
    again = words if again is None else again
    return f"full-prefill chronological : {words}\nfull-prefill chronological repeat : {again}\n"


def clean(policy: str = "token-topk", words: str = "a b c d", orders: Sequence[str] = ("reversed",)) -> str:
    """A policy under which every answer is full prefill's."""
    return full_prefill(words) + arm_lines(
        policy, {"chronological": words} | dict.fromkeys(orders, words), words, words
    )


def position(order: str, index: int, count: int) -> int:
    """Where an order serves request `index`."""
    if order == "chronological":
        return index
    if order == "reversed":
        return count - 1 - index
    places = list(range(count))
    random.Random(order).shuffle(places)
    return places[index]


def _row(planned: PlannedArm, index: int, word: str, count: int, texts: Mapping[str, str]) -> dict[str, Any]:
    is_policy = planned.policy != "full-prefill"
    place = position(planned.order, index, count)
    answered = word != "!"
    text = "" if word == "_" else texts.get(word, word)
    return {
        "arm_id": planned.arm_id,
        "engine": "embedded",
        "policy": planned.policy,
        "order": planned.order,
        "control": planned.control,
        "position": place,
        "request_id": f"r{index}",
        "prompt_tokens": 100,
        "answer_text": text if answered else None,
        "answer_ids": ([] if word == "_" else [crc32(word.encode()) % 30000]) if answered else None,
        "ttft_ms": 10.0 if is_policy else 50.0,
        "first_reused_tokens": 60 if is_policy and place and planned.control != "reset" else 0,
        "reused_tokens": 60 if is_policy and place and planned.control != "reset" else 0,
        "reusable_tokens": 60 if is_policy else 0,
        "recomputed_tokens": 9 if is_policy else 0,
        "budget_k": 9 if is_policy else 0,
        "cache_entries_before": 0 if place == 0 or planned.control == "reset" else None,
        "fragmentation": 3 if is_policy else None,
        "captured_deviation": 0.5 if is_policy else None,
        "kl": 0.25 if is_policy else None,
        "reference_logprob": -2.0 if is_policy else None,
        "error": None if answered else "engine failed",
    }
