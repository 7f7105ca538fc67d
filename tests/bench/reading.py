"""How fast and in how much memory a trace is read and inspected, on one core.

    python tests/bench/reading.py [--requests 20000] [--window 460] [--words 12] [--no-reading] [--no-inspect]

Makes a rolling trace in kvaudit's own format (plain JSON lines, segments recurring), reads it as `read_trace` and as
`iter_requests` do, and parses the same lines with `orjson.loads` alone, in turns, best of three. Then inspects it in a
process of its own and reports that process's peak memory. With the defaults the trace has about 0.2 GB; with
`--requests 200000 --window 520 --no-reading`, 2 GB. Its files are deleted.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import process_time

import orjson

from kvaudit.records import Request
from kvaudit.traces import read_trace
from kvaudit.traces.segments import make_segment
from kvaudit.traces.streaming import iter_requests
from kvaudit.traces.writer import write_trace

DOCUMENTS = 20_000
WORDS = ("price", "volume", "open", "close", "rises", "falls", "market", "session", "trade", "limit", "order", "report")


def rolling_requests(count: int, window: int, words: int) -> Iterator[Request]:
    """Windows over a ring of documents of so many words, a separator before each."""
    random = Random(0)
    separator = make_segment("separator", " # # ")
    instruction = make_segment("instruction", "Answer from the rows below.\n")
    documents = [
        make_segment("document", f"{index},{' '.join(random.choices(WORDS, k=words))},{random.random():.4f}\n")
        for index in range(DOCUMENTS)
    ]
    queries = [make_segment("query", f"\nrow {index}:") for index in range(1000)]
    for ordinal in range(count):
        segments = [instruction]
        for offset in range(window // 2):
            segments += (separator, documents[(ordinal + offset) % DOCUMENTS])
        segments += (separator, queries[ordinal % len(queries)])
        yield Request(f"r{ordinal}", ordinal, tuple(segments), session=f"s{ordinal % 50}")


def parse_alone(path: Path) -> None:
    with path.open("rb") as stream:
        for line in stream:
            orjson.loads(line)


def read_whole(path: Path) -> None:
    read_trace(path)


def read_streaming(path: Path) -> None:
    for _ in iter_requests(path):
        pass


def seconds(work: Callable[[Path], None], path: Path) -> float:
    """In processor time: what a core of its own takes."""
    began = process_time()
    work(path)
    return process_time() - began


def report_reading(path: Path) -> None:
    megabytes = path.stat().st_size / 1e6
    ways = {"orjson.loads alone": parse_alone, "iter_requests": read_streaming, "read_trace": read_whole}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, work in ways.items():
            taken[name].append(seconds(work, path))
    best = {name: min(times) for name, times in taken.items()}
    print(f"{megabytes:,.0f} MB, plain")
    for name, took in best.items():
        print(f"{name:<20} {megabytes / took:7,.0f} MB/s  {took / best['orjson.loads alone']:5.2f} x orjson.loads")


def report_inspecting(path: Path) -> None:
    subprocess.run([sys.executable, "-m", "kvaudit", "inspect", str(path)], check=True, stdout=subprocess.DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"kvaudit inspect, {path.stat().st_size / 1e6:,.0f} MB: {used.ru_utime + used.ru_stime:,.0f} s of a processor, "
        f"peak {used.ru_maxrss / 1024:,.0f} MiB resident"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=460, help="segments in a prompt, separators among them")
    parser.add_argument("--words", type=int, default=12, help="in a document: few give many references for little text")
    parser.add_argument("--no-reading", action="store_true", help="do not time reading")
    parser.add_argument("--no-inspect", action="store_true", help="do not inspect")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvaudit-bench-") as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(path, rolling_requests(arguments.requests, arguments.window, arguments.words))
        if not arguments.no_reading:
            report_reading(path)
        if not arguments.no_inspect:
            report_inspecting(path)


if __name__ == "__main__":
    main()
