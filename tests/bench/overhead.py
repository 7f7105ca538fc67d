"""The share of a replay's wall time that is not the engine: trace, prompts, store, comparison and report.

    python tests/bench/overhead.py [TRACE] [--orders 5]

Replays the trace on the embedded engine with every call to the engine timed, then reports it. Opening the engine
(loading weights) is the engine's own time.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from kvaudit.analysis.audit import analyse
from kvaudit.engines import EngineSettings
from kvaudit.engines.embedded import open_engine
from kvaudit.plan import make_plan
from kvaudit.plugins import load
from kvaudit.replay import replay
from kvaudit.store import new_manifest, open_folder
from kvaudit.traces import read_trace

FIXTURE = Path(__file__).parents[2] / "fixtures" / "rolling.jsonl.gz"


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - began


class Timed:
    """An engine whose every call runs the clock."""

    def __init__(self, engine: Any, clock: Clock) -> None:
        self._engine, self._clock = engine, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        if name not in ("serve", "reset", "close", "describe"):
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._clock.running():
                return found(*args, **kwargs)

        return timed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace", nargs="?", type=Path, default=FIXTURE)
    options.add_argument("--orders", type=int, default=5)
    given = options.parse_args()
    engine_clock, whole = Clock(), Clock()

    def opened() -> Timed:
        with engine_clock.running():
            return Timed(open_engine(settings), engine_clock)

    settings = EngineSettings()
    with tempfile.TemporaryDirectory() as folder, whole.running():
        trace = read_trace(given.trace)
        plan = make_plan(len(trace.requests), "embedded", settings, (), given.orders)
        with open_folder(Path(folder) / "run", new_manifest(trace, plan, 0.0), force=False) as run_folder:
            replay(trace, opened, plan, run_folder)
            replayed = perf_counter()
            audit = analyse(run_folder.run, provenance=run_folder.run.provenance)
            run_folder.write_table("comparisons", audit.comparisons.to_batches())
            run_folder.write_table("summary", audit.summary.to_batches())
        load("reports", "terminal")(audit, io.StringIO())
        analysed = perf_counter() - replayed
    rest = whole.seconds - engine_clock.seconds
    print(f"{len(trace.requests)} requests, {len(plan.arms)} arms: {whole.seconds:.1f} s in all")
    share = rest / whole.seconds
    print(f"  engine {engine_clock.seconds:.1f} s, everything else {rest:.2f} s: {share:.2%} of the wall time")
    print(f"  of which analysis and report {analysed:.2f} s (with the first import of scipy and statsmodels)")


if __name__ == "__main__":
    main()
