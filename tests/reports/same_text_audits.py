"""An audit with the same foreign text in every place where a run can hold one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
from audit_runs import BuiltRun, PlannedArm, arm_lines, full_prefill, run
from report_audits import audited

from kvaudit.analysis.audit import Audit
from kvaudit.schema import TABLES

REQUESTS = 3
LONGEST_NAME, LONGEST_SETTING = 200, 5_000
"""Answers and errors may be of any length; nobody's names and settings are longer."""


def audit_of(text: str) -> Audit:
    """`text` begins every name (policy, orders, arms, requests, contents, settings), answer, error and setting.

    One of three requests changes with the order, and one ends in an error.
    """
    setting = text[:LONGEST_SETTING]
    built = run(
        full_prefill("t u v")
        + arm_lines("p", {"chronological": "t u v", "reversed": "x u !"}, reset="x u v", repeat="t u v"),
        texts={"t": text, "u": f"{text}2", "x": f"{text}x"},
        expected=[text, None, None],
        documents=[[_name(text, "d"), "e"], [_name(text, "d"), "f"], ["f"]],
        settings={"model": setting, "switches": {_name(text, "s"): setting}, "policies": [setting, setting]},
    )
    arms = {arm.arm_id: arm if arm.policy == "full-prefill" else _renamed(arm, text) for arm in built.planned}

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        arm = arms[row["arm_id"]]
        names = {"arm_id": arm.arm_id, "policy": arm.policy, "order": arm.order}
        return row | names | {"request_id": _name(text, row["request_id"]), "error": row["error"] and text + "!"}

    requests = [row | {"request_id": _name(text, row["request_id"])} for row in built.table("requests").to_pylist()]
    named = replace(built.with_rows(rename), planned=tuple(arms.values()))
    named.tables["requests"] = pa.Table.from_pylist(requests, TABLES["requests"])
    named.tables["provenance"] = pa.Table.from_pylist(_provenance(named, text), TABLES["provenance"])
    named.manifest["trace"] |= {"source": setting}
    named.manifest["engine"] |= {_name(text, "e"): setting}
    return audited(named, min_fidelity=0.9)


def _name(text: str, suffix: str) -> str:
    return text[:LONGEST_NAME] + suffix


def _renamed(arm: PlannedArm, text: str) -> PlannedArm:
    return replace(arm, policy=_name(text, arm.policy), order=_name(text, arm.order), arm_id=_name(text, arm.arm_id))


def _provenance(built: BuiltRun, text: str) -> list[dict[str, Any]]:
    return [
        {
            "arm_id": arm.arm_id,
            "request_id": request,
            "segment": 0,
            "content_id": _name(text, "d"),
            "writer_request_id": _name(text, f"r{index % 2}"),
            "writer_part": "request",
            "write_ordinal": 0,
            "old_position": 1,
            "new_position": 2,
            "context_hash_written": "a",
            "context_hash_now": "b",
        }
        for index, arm in enumerate(built.planned)
        if arm.policy != "full-prefill"
        for request in built.table("requests")["request_id"].to_pylist()
    ]
