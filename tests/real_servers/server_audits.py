"""Short traces for servers that compute on a CPU, and audits of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvaudit.analysis.audit import Audit, analyse
from kvaudit.analysis.gates import Gates
from kvaudit.engines import EngineSettings
from kvaudit.plan import make_plan
from kvaudit.plugins import load
from kvaudit.records import Trace
from kvaudit.replay import replay
from kvaudit.store import new_manifest, open_folder, open_run
from kvaudit.traces import read_trace

MODEL = "smollm2-135m"
ROLLING = Path(__file__).parents[2] / "fixtures" / "rolling.jsonl.gz"
_ROOMS = "\n".join(
    f"Room {number} of the Harbour Hotel has {1 + number % 3} beds, a view of the "
    f"{('sea', 'garden', 'street')[number % 3]} and costs {60 + 7 * number % 40} euros."
    for number in range(1, 8)
)
_QUESTIONS = ("What does room 3 cost?", "How many beds has room 5?", "What is the view of room 7?")


def chats(folder: Path) -> Trace:
    """Questions behind the same long instruction, which a prefix cache keeps."""
    system = {"role": "system", "content": f"Answer in a few words from these facts.\n{_ROOMS}"}
    lines = [{"messages": [system, {"role": "user", "content": question}], "max_tokens": 12} for question in _QUESTIONS]
    path = folder / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return read_trace(path)


def windows(requests: int) -> Trace:
    """Windows of documents that move by one: what the last one left in a cache is all that there is of history."""
    trace = read_trace(ROLLING)
    return replace(trace, requests=tuple(replace(request, prelude=()) for request in trace.requests[:requests]))


def settings(url: str, **options: str) -> EngineSettings:
    given = {"base-url": url, **{name.replace("_", "-"): value for name, value in options.items()}}
    return EngineSettings(model=MODEL, options=given)


def audited(folder: Path, trace: Trace, engine: EngineSettings) -> tuple[Audit, list[dict[str, Any]]]:
    """The audit of two orders, and its observations."""
    plan = make_plan(len(trace.requests), "server", engine, (), 2)
    with open_folder(folder, new_manifest(trace, plan, 0.0)) as claimed:
        replay(trace, lambda: load("engines", "server")(engine), plan, claimed)
    run = open_run(folder)
    return analyse(run, Gates(), run.provenance), run.table("observations").to_pylist()
