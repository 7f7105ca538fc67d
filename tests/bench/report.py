"""Time and memory of `kvaudit report` on a large run, beside a plain scan of the same files.

    python tests/bench/report.py [--requests 40000] [--policies 5] [--orders 5]

Writes such a run into a temporary folder, reports it as JSON in a process of its own, and reads every column of the
observations with pyarrow alone in another. Exit code 1 when the report took longer than 30 s or more than 2 GB.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kvaudit.engines import EngineSettings
from kvaudit.plan import Plan, make_plan
from kvaudit.records import FULL_PREFILL, Arm
from kvaudit.schema import TABLES
from kvaudit.store import RunFolder, new_manifest, open_folder
from kvaudit.store.layout import ARM_TABLES, OBSERVATIONS, part_path
from kvaudit.store.writing import write_table

POLICIES = ("token-topk", "single-window", "fixed-chunk", "random-document", "document-aligned")
SECONDS, BYTES = 30, 2e9
BATCH = 5_000
WINDOW = 20
FLIPS = 0.1
SCAN = "import sys, pyarrow.parquet as pq; [pq.read_table(path) for path in sys.argv[1:]]"


class Answers:
    """Full prefill's answer to every request, of 5 to 20 tokens, and what stands in its place where it flips."""

    def __init__(self, requests: int) -> None:
        generator = np.random.default_rng(0)
        self._offsets = np.concatenate([[0], np.cumsum(generator.integers(5, 21, requests))]).astype(np.int32)
        self._ids = generator.integers(0, 49_152, int(self._offsets[-1])).astype(np.int32)
        self._texts = pa.array([f"{131 + index / 7:.3f}, volume {index * 7919 % 100_003}" for index in range(requests)])

    def of(self, arm: Arm) -> tuple[pa.Array, pa.Array]:
        """Token ids and texts in one arm; the repeat control reproduces the chronological order."""
        last = self._offsets[1:] - 1
        changed = np.zeros(len(last), np.int32)
        if arm.policy != FULL_PREFILL:
            generator = np.random.default_rng(crc32(f"{arm.policy} {arm.order.name}".encode()))
            changed = ((generator.random(len(last)) < FLIPS) * generator.integers(1, 4, len(last))).astype(np.int32)
        ids = self._ids.copy()
        ids[last] += changed
        endings = pa.array(["", " or so", " at most", "0"]).take(pa.array(changed))
        return pa.ListArray.from_arrays(self._offsets, ids), pc.binary_join_element_wise(self._texts, endings, "")


class Measured(NamedTuple):
    seconds: float
    processor: float
    megabytes: float
    exit_code: int


def measured(*command: str) -> Measured:
    """A command in a process of its own: wall time, time on all CPUs, peak memory."""
    began = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    scale = 1 if sys.platform == "darwin" else 1_024
    seconds, megabytes = perf_counter() - began, usage.ru_maxrss * scale / 1e6
    return Measured(seconds, usage.ru_utime + usage.ru_stime, megabytes, os.waitstatus_to_exitcode(status))


def write_run(path: Path, requests: int, plan: Plan) -> None:
    generator = np.random.default_rng(0)
    answers = Answers(requests)
    trace: Any = SimpleNamespace(digest="0" * 64, source="bench.jsonl", requests=range(requests))
    with open_folder(path, new_manifest(trace, plan, 0.0)) as folder:
        folder.begin({"name": "bench", "device": "none"})
        for derived in ("references", "comparisons", "summary"):
            folder.write_table(derived, [])
        folder.write_table("requests", requests_table(requests).to_batches(max_chunksize=BATCH))
        for arm in plan.arms:
            write_arm(folder, arm, answers, generator)
        folder.finish()


def write_arm(folder: RunFolder, arm: Arm, answers: Answers, generator: np.random.Generator) -> None:
    for name in ARM_TABLES:
        table = observations(arm, answers, generator) if name == OBSERVATIONS else TABLES[name].empty_table()
        batches: Iterator[pa.RecordBatch] = iter(table.to_batches(max_chunksize=BATCH))
        write_table(part_path(folder.path, name, arm.arm_id), name, folder.run.stamp, batches)


def observations(arm: Arm, answers: Answers, generator: np.random.Generator) -> pa.Table:
    permutation = np.array(arm.order.permutation)
    requests = len(permutation)
    position = np.argsort(permutation)
    ids, texts = answers.of(arm)
    reuses = arm.policy != FULL_PREFILL
    fresh = (position == 0) | (arm.control == "reset")
    reused = np.where(fresh | (not reuses), 0, generator.integers(400, 900, requests))
    budget = np.where(reuses, reused // 20, 0)
    time_to_first_token = generator.normal(420 if reuses else 2_400, 20, requests)
    columns: dict[str, Any] = {
        "arm_id": pa.repeat(arm.arm_id, requests),
        "engine": pa.repeat("bench", requests),
        "policy": pa.repeat(arm.policy, requests),
        "order": pa.repeat(arm.order.name, requests),
        "control": pa.repeat(arm.control, requests),
        "position": position,
        "request_id": request_ids(requests),
        "prompt_tokens": np.full(requests, 1_000),
        "answer_text": texts,
        "answer_ids": ids,
        "finish_reason": pa.repeat("stop", requests),
        "ttft_ms": time_to_first_token,
        "total_ms": time_to_first_token + generator.normal(300, 20, requests),
        "reused_tokens": reused,
        "reusable_tokens": reused,
        "recomputed_tokens": budget,
        "budget_k": budget,
        "first_reused_tokens": reused,
        "cache_entries_before": np.where(fresh, 0, WINDOW),
        "fragmentation": generator.integers(1, 200, requests),
        "captured_deviation": generator.random(requests),
        "kl": generator.exponential(0.1, requests),
        "reference_logprob": generator.normal(-4, 1, requests),
        "margin": generator.exponential(2, requests),
    }
    schema = TABLES[OBSERVATIONS]
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(requests, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays([chunked(array) for array in arrays], schema=schema).take(pa.array(permutation))


def chunked(array: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def requests_table(requests: int) -> pa.Table:
    """A rolling window: each request brings one document and drops one."""
    place = np.tile(np.arange(WINDOW), requests)
    segments = pa.StructArray.from_arrays(
        [
            pa.repeat("document", requests * WINDOW),
            pc.binary_join_element_wise(
                "d", pa.array(np.repeat(np.arange(requests), WINDOW) + place).cast(pa.string()), ""
            ),
            pa.array(place * 48),
            pa.array((place + 1) * 48),
        ],
        fields=list(TABLES["requests"].field("segments").type.value_type),
    )
    offsets = pa.array(np.arange(requests + 1) * WINDOW, pa.int32())
    columns: dict[str, Any] = {
        "request_id": request_ids(requests),
        "ordinal": pa.array(np.arange(requests)),
        "prompt_tokens": pa.array(np.full(requests, 1_000)),
        "segments": pa.ListArray.from_arrays(offsets, segments),
    }
    schema = TABLES["requests"]
    return pa.table([columns.get(field.name, pa.nulls(requests, field.type)) for field in schema], schema=schema)


def request_ids(requests: int) -> pa.Array:
    return pc.binary_join_element_wise("r", pa.array(np.arange(requests)).cast(pa.string()), "")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=40_000)
    options.add_argument("--policies", type=int, default=5, choices=range(1, 6))
    options.add_argument("--orders", type=int, default=5)
    given = options.parse_args()
    plan = make_plan(given.requests, "embedded", EngineSettings(), POLICIES[: given.policies], given.orders)
    with tempfile.TemporaryDirectory() as folder:
        run, out = Path(folder) / "run", Path(folder) / "audit.json"
        write_run(run, given.requests, plan)
        parts = sorted(map(str, (run / OBSERVATIONS).glob("*.parquet")))
        scan = measured(sys.executable, "-c", SCAN, *parts)
        report = measured(sys.executable, "-m", "kvaudit", "report", str(run), "--format", "json", "-o", str(out))
        if report.exit_code not in (0, 4) or not out.stat().st_size:
            print(f"the report failed with exit code {report.exit_code}")
            return 1
    print(f"{given.requests * len(plan.arms):,} observations in {len(plan.arms)} arms, {os.cpu_count()} CPUs")
    for name, found in (("kvaudit report --format json", report), ("pyarrow reads the same files", scan)):
        print(f"  {name}  {found.seconds:6.1f} s ({found.processor:.1f} s of CPU)  {found.megabytes:6,.0f} MB")
    print(f"  ratio  {report.seconds / scan.seconds:.1f} in time, {report.megabytes / scan.megabytes:.1f} in memory")
    return int(report.seconds > SECONDS or report.megabytes > BYTES / 1e6)


if __name__ == "__main__":
    sys.exit(main())
