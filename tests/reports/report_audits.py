"""Audits that report tests share."""

from __future__ import annotations

import io
import random
from typing import Any

import pyarrow as pa
from audit_runs import BuiltRun, arm_lines, full_prefill, run

from kvaudit.analysis.audit import Audit, analyse
from kvaudit.analysis.gates import Gates
from kvaudit.schema import TABLES

ORDERS = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")
REQUESTS = 16


def rich_run(texts: dict[str, str] | None = None) -> BuiltRun:
    """Two policies in five orders over a rolling window, one of them with much more damage; provenance included."""
    generator = random.Random(3)
    full = [f"v{index}" for index in range(REQUESTS)]

    def damaged(rate: float) -> str:
        return " ".join(word + "x" * (generator.random() < rate) for word in full)

    def policy(name: str, first: float, others: float, reset: float) -> str:
        chronological = damaged(first)
        orders = {order: damaged(others) for order in ORDERS} | {"chronological": chronological}
        return arm_lines(name, orders, damaged(reset), chronological)

    answers = {word: f"131.2{index},7{index}" for index, word in enumerate(full)}
    answers |= {word + "x": f"13{index}.99,7{index}" for index, word in enumerate(full)}
    built = run(
        full_prefill(" ".join(full))
        + "\n".join([policy("token-topk", 0.1, 0.5, 0.1), policy("document-aligned", 0.1, 0.15, 0.0)]),
        texts=answers | (texts or {}),
        expected=[answers[word] for word in full],
        documents=[[f"d{place}" for place in range(first, first + 8)] for first in range(REQUESTS)],
        columns=lambda arm, index: {"kl": 0.01 * index, "margin": 0.4, "first_difference": 2},
        settings={
            "engine": "embedded",
            "model": "smollm2-135m",
            "recompute_ratio": 0.15,
            "seed": 0,
            "policies": ["token-topk", "document-aligned"],
            "switches": {"mask": "bottom-right", "gap": "zero", "lookup": "stop-at-miss", "capacity_bytes": None},
        },
    )
    built.tables["provenance"] = pa.Table.from_pylist(_provenance(built), TABLES["provenance"])
    return built


def audited(built: BuiltRun, **gates: Any) -> Audit:
    return analyse(built, Gates(**gates), built.provenance)


def rendered(render: Any, audit: Audit) -> str:
    out = io.StringIO()
    render(audit, out)
    return out.getvalue()


def _provenance(built: BuiltRun) -> list[dict[str, Any]]:
    return [
        {
            "arm_id": arm.arm_id,
            "request_id": f"r{index}",
            "segment": segment,
            "content_id": f"d{index + segment}",
            "writer_request_id": f"r{(index + segment * len(arm.order)) % REQUESTS}",
            "writer_part": "prelude" if segment else "request",
            "write_ordinal": segment,
            "old_position": 40 * segment + 10,
            "new_position": 40 * segment,
            "context_hash_written": "a",
            "context_hash_now": "b" if segment else "a",
            "computed_over": [],
        }
        for arm in built.arms()
        if arm.policy != "full-prefill"
        for index in range(REQUESTS)
        for segment in range(3)
    ]
