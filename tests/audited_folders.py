"""Whole run folders on disk, with tables rich enough that every query finds something."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fakes import rolling_trace, run_scripted, scripted_settings

from kvaudit.analysis.audit import Audit, analyse
from kvaudit.analysis.verdict import Gates
from kvaudit.records import Trace
from kvaudit.rows import first_difference
from kvaudit.store import Run, layout, open_run, writing

CAPACITY = 200_000
"""Bytes: a few documents more than a window, so that entries are evicted and written again."""


def scripted_run(path: Path, trace: Trace | None = None, *, capacity: int | None = CAPACITY) -> Run:
    """A replay on the scripted engine whose cache remembers a prelude and is short of room."""
    trace = trace or rolling_trace(20, window=3, prelude=True)
    return run_scripted(
        path, trace, scripted_settings(capacity=capacity), policies=("token-topk", "document-aligned"), orders=4
    )


def damaged_run(path: Path, *, reproduces: bool = True, **options: Any) -> Run:
    """The same with answers, times, margins and divergences as they are in a run that went wrong here and there.

    The repeat control reproduces every answer, errors too, unless it is told not to.
    """
    run = scripted_run(path, **options)
    references = {
        row["request_id"]: row["answer_ids"]
        for row in run.table("observations").to_pylist()
        if row["arm_id"] == "full-prefill.chronological"
    }
    for place, part in list(run.parts("observations")):
        rows = part.to_pylist()
        for number, row in enumerate(rows):
            control = "none" if reproduces and row["control"] == "repeat" else row["control"]
            luck = random.Random(f"{row['policy']} {row['order']} {control} {number}")
            row |= _spoiled(row, references[row["request_id"]], luck)
        writing.write_table(path / place, "observations", run.stamp, [rows])
    return open_run(path)


def finish(run: Run, gates: Gates | None = None) -> Audit:
    """Write what the audit makes of a run beside its tables, as `kvaudit replay` does."""
    audit = analyse(run, gates, run.provenance)
    for name, table in (("comparisons", audit.comparisons), ("summary", audit.summary)):
        writing.write_table(layout.table_path(run.path, name), name, run.stamp, table.to_batches())
    return audit


def _spoiled(row: dict[str, Any], reference: list[int], luck: random.Random) -> dict[str, Any]:
    """What went wrong with an observation, by column."""
    ttft = luck.choice([None, *(luck.uniform(1, 9) for _ in range(9))])
    if row["policy"] == "full-prefill":
        return {"ttft_ms": ttft}
    measured = {
        "ttft_ms": ttft,
        "margin": luck.uniform(0, 4),
        "kl": luck.choice([None, luck.uniform(0, 2), luck.uniform(0, 2)]),
        "reference_logprob": -luck.uniform(0, 9),
    }
    if luck.random() < 0.05:
        return measured | {"answer_text": None, "answer_ids": None, "error": "connection reset"}
    often = row["policy"] == "document-aligned" and row["control"] != "reset"
    damage = luck.choice(["a", "bcd"]) if luck.random() < (0.8 if often else 0.2) else ""
    text = damage + row["answer_text"][len(damage) :]
    ids = list(text.encode())
    return measured | {"answer_text": text, "answer_ids": ids, "first_difference": first_difference(ids, reference)}
