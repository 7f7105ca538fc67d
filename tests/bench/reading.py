"""How fast and in how much memory a trace is read and inspected, on one core.

    python tests/bench/reading.py [--requests 20000] [--window 460] [--words 12] [--no-reading] [--no-inspect]

Makes traces in kvaudit's own format (plain JSON lines), reads them with `read_trace` and parses the same lines with
`orjson.loads` alone, in turns, best of three. `TraceDigest` alone is what a trace's digest takes of the time of
`read_trace`, without its shortcuts. The traces: a rolling window (segments recur), short segments that never recur,
huge ones, and prompts that share segments but no order. Then inspects the rolling one in a process of
its own and reports that process's peak memory. With the defaults it has about 0.2 GB; with
`--requests 200000 --window 520 --no-reading`, 2 GB. Files are deleted.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from time import process_time

import orjson

from kvaudit.records import Request
from kvaudit.traces import read_trace
from kvaudit.traces.segments import TraceDigest, make_segment
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


def short_requests(count: int) -> Iterator[Request]:
    """Forty short segments a prompt, each of them once in the trace."""
    for ordinal in range(count):
        texts = (f"row {ordinal * 40 + index}: {WORDS[index % len(WORDS)]}\n" for index in range(40))
        yield Request(f"r{ordinal}", ordinal, tuple(make_segment("document", text) for text in texts))


def huge_requests(count: int) -> Iterator[Request]:
    """One segment of 0.4 MB a prompt."""
    random = Random(0)
    for ordinal in range(count):
        yield Request(f"r{ordinal}", ordinal, (make_segment("document", " ".join(random.choices(WORDS, k=60_000))),))


def mixed_requests(count: int) -> Iterator[Request]:
    """Two hundred of five thousand segments a prompt, in any order."""
    random = Random(0)
    documents = [
        make_segment("document", f"row {index} {' '.join(random.choices(WORDS, k=12))}") for index in range(5000)
    ]
    for ordinal in range(count):
        yield Request(f"r{ordinal}", ordinal, tuple(random.sample(documents, 200)))


def parse_alone(path: Path) -> None:
    with path.open("rb") as stream:
        for line in stream:
            orjson.loads(line)


def read_whole(path: Path) -> None:
    read_trace(path)


def seconds(work: Callable[[Path], None], path: Path) -> float:
    """In processor time: what a core of its own takes."""
    began = process_time()
    work(path)
    return process_time() - began


def digest_seconds(path: Path) -> float:
    requests = read_trace(path).requests
    digest = TraceDigest()
    began = process_time()
    for request in requests:
        digest.add(request)
    return process_time() - began


def report_reading(name: str, path: Path) -> None:
    megabytes = path.stat().st_size / 1e6
    ways: dict[str, Callable[[Path], float]] = {
        "orjson.loads alone": partial(seconds, parse_alone),
        "read_trace": partial(seconds, read_whole),
        "TraceDigest alone": digest_seconds,
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(3):
        for way, time in ways.items():
            taken[way].append(time(path))
    best = {way: min(times) for way, times in taken.items()}
    print(f"{name}: {megabytes:,.0f} MB, plain")
    for way, took in best.items():
        print(f"  {way:<20} {megabytes / took:7,.0f} MB/s  {took / best['orjson.loads alone']:5.2f} x orjson.loads")


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
        path, other = Path(folder) / "rolling.jsonl", Path(folder) / "other.jsonl"
        write_trace(path, rolling_requests(arguments.requests, arguments.window, arguments.words))
        if not arguments.no_reading:
            report_reading("rolling window", path)
            shapes = {
                "short segments": short_requests(arguments.requests // 4),
                "huge segments": huge_requests(arguments.requests // 100),
                "any order": mixed_requests(arguments.requests // 2),
            }
            for name, requests in shapes.items():
                write_trace(other, requests)
                report_reading(name, other)
        if not arguments.no_inspect:
            report_inspecting(path)


if __name__ == "__main__":
    main()
