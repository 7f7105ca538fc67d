"""An audit in which every foreign text tries to get out of its place."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
from report_audits import ORDERS, audited, rich_run

from kvaudit.analysis.audit import Audit
from kvaudit.schema import TABLES

SCRIPT = "<script>document.title='owned'</script>"
ATTRIBUTE = "\"'><img src=x onerror=document.title='owned'>"
STYLE = "</style></title><svg onload=document.title='owned'>"
TEMPLATE = "{{ 7 * 191 }}{% raw %}"
REVERSED_TEXT = "\u202eevil\u202c"
INVISIBLE = "a\u2028b\u2029c\x00d\x1b[31me\x07\u200bf\ufeffg"
SHOWN_INVISIBLE = r"a\u2028b\u2029c\x00d\x1b[31me\x07\u200bf\ufeffg"
MATHS = r"$\frac{a$ #010100 &amp; ]]>"
POLICY = f"{SCRIPT}{MATHS}"
OTHER_POLICY = f"_{ATTRIBUTE}"


def hostile_audit() -> Audit:
    """Answers, request ids, policies, arms and settings with markup, escapes and invisible marks."""
    texts = {f"v{index}": f"{INVISIBLE}{STYLE}{TEMPLATE}{index}" for index in range(16)}
    texts |= {f"v{index}x": f"{INVISIBLE}{STYLE}{SCRIPT}{ATTRIBUTE}{REVERSED_TEXT}{index}" for index in range(16)}
    built = rich_run(texts)
    names = {"token-topk": POLICY, "document-aligned": OTHER_POLICY}
    tables = {
        name: _renamed(table, name, names) if name in ("observations", "provenance", "requests") else table
        for name, table in built.tables.items()
    }
    arms = tuple(
        replace(arm, policy=names.get(arm.policy, arm.policy), arm_id=_arm_id(arm.arm_id, names))
        for arm in built.arms()
    )
    settings = {SCRIPT: ATTRIBUTE, "model": STYLE, "seed": 0, "options": {INVISIBLE: [TEMPLATE, {REVERSED_TEXT: 1}]}}
    manifest = {**built.manifest, "settings": settings, "trace": {"source": SCRIPT + INVISIBLE}, "host": {MATHS: STYLE}}
    hostile = replace(built, planned=arms, tables=tables, manifest=manifest)
    assert len(ORDERS) * len(names) + 6 == len(arms)
    return audited(hostile, min_fidelity=0.5)


def _renamed(table: pa.Table, name: str, names: dict[str, str]) -> pa.Table:
    rows = table.to_pylist()
    for row in rows:
        for column in ("request_id", "writer_request_id"):
            if column in row:
                row[column] = f"{ATTRIBUTE}{row[column]}{INVISIBLE}"
        if "policy" in row:
            row["policy"] = names.get(row["policy"], row["policy"])
        if "arm_id" in row:
            row["arm_id"] = _arm_id(row["arm_id"], names)
    return pa.Table.from_pylist(rows, TABLES[name])


def _arm_id(arm_id: str, names: dict[str, str]) -> str:
    for plain, hostile in names.items():
        arm_id = arm_id.replace(plain, hostile)
    return arm_id
