"""Audits with many requests, made column by column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from audit_runs import BuiltRun, PlannedArm, arm

from kvaudit.analysis.audit import Audit, analyse
from kvaudit.schema import TABLES

ORDERS = ("chronological", "reversed", "shuffle-1", "shuffle-2", "shuffle-3")


def large_audit(requests: int, policies: Sequence[str], orders: Sequence[str] = ORDERS) -> Audit:
    """Every policy damages answers more in the later orders, and more than the policy before it."""
    generator = np.random.default_rng(0)
    arms = [arm("full-prefill"), arm("full-prefill", control="repeat")]
    for policy in policies:
        arms += [arm(policy, order) for order in orders]
        arms += [arm(policy, control="reset"), arm(policy, control="repeat")]
    chronological = {policy: generator.random(requests) < 0.05 * place for place, policy in enumerate(policies)}
    tables = [_observations(planned, requests, policies, orders, chronological, generator) for planned in arms]
    manifest = {
        "schema_version": 1,
        "trace": {"source": "large.jsonl"},
        "settings": {"engine": "embedded", "model": "tiny", "seed": 0},
    }
    stream = pa.table(
        {
            "request_id": [f"r{index}" for index in range(requests)],
            "ordinal": np.arange(requests),
            "prompt_tokens": np.full(requests, 100),
            "segments": pa.array([[]] * requests, TABLES["requests"].field("segments").type),
        }
    )
    built = BuiltRun(
        tuple(arms),
        {"observations": pa.concat_tables(tables), "requests": _filled(stream, "requests")},
        manifest,
    )
    return analyse(built)


def _observations(
    planned: PlannedArm,
    requests: int,
    policies: Sequence[str],
    orders: Sequence[str],
    chronological: dict[str, np.ndarray],
    generator: np.random.Generator,
) -> pa.Table:
    reuses = planned.policy != "full-prefill"
    differs = np.zeros(requests, bool)
    if reuses and planned.order == "chronological" and planned.control != "reset":
        differs = chronological[planned.policy]
    elif reuses and planned.control == "none":
        differs = generator.random(requests) < 0.1 * policies.index(planned.policy) * orders.index(planned.order)
    position = np.arange(requests) if planned.order == "chronological" else generator.permutation(requests)
    answers = [f"answer {index}{'!' * damaged}" for index, damaged in enumerate(differs.tolist())]
    reused = np.where((position > 0) & (planned.control != "reset") & reuses, generator.integers(50, 90, requests), 0)
    columns = {
        "arm_id": [planned.arm_id] * requests,
        "engine": ["embedded"] * requests,
        "policy": [planned.policy] * requests,
        "order": [planned.order] * requests,
        "control": [planned.control] * requests,
        "position": position,
        "request_id": [f"r{index}" for index in range(requests)],
        "prompt_tokens": np.full(requests, 100),
        "answer_text": answers,
        "ttft_ms": generator.uniform(10, 20, requests),
        "reused_tokens": reused,
        "first_reused_tokens": reused,
        "cache_entries_before": np.zeros(requests, np.int64),
    }
    if reuses:
        columns |= {
            "reusable_tokens": np.full(requests, 90),
            "recomputed_tokens": np.full(requests, 9),
            "budget_k": np.full(requests, 9),
            "fragmentation": generator.integers(1, 200, requests),
            "captured_deviation": generator.random(requests),
            "kl": generator.random(requests),
            "margin": generator.lognormal(0, 2, requests),
            "first_difference": pa.array(generator.integers(0, 40, requests), mask=~differs),
        }
    return _filled(pa.table(columns), "observations")


def _filled(table: pa.Table, name: str) -> pa.Table:
    schema = TABLES[name]
    return pa.table(
        {
            field.name: table[field.name].cast(field.type)
            if field.name in table.column_names
            else pa.nulls(len(table), field.type)
            for field in schema
        }
    )
