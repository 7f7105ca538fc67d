"""What kvaudit adds to a request, as a ratio to a bare httpx loop over the same requests to the same server.

    python tests/bench/server.py [--requests 400] [--rounds 3] [--prefill 0.0]

A server in a process of its own streams answers of 16 tokens; `--prefill` is how long it lets a request wait, in
seconds: 0 shows the worst ratio, a real model's prefill the usual one. In turns: the bare loop, the engine alone, and
a replay's arms that keep their history. Resets are not counted: they are the audit's method, and their number is known
(two probes each). What is told is the median of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from fakes import rolling_trace

from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine
from kvaudit.engines.server.asking import Manner
from kvaudit.plan import make_plan
from kvaudit.policies.as_served import AsServed
from kvaudit.records import AS_SERVED, Sampling, Trace
from kvaudit.replay import Silent, replay
from kvaudit.store import new_manifest, open_folder
from kvaudit.wordings import Wordings

SERVER = """
import asyncio, json, sys
prefill = float(sys.argv[1])
def event(choices, **more):
    data = b"data: " + json.dumps({"id": "c", "model": "m", "choices": choices, **more}).encode() + b"\\n\\n"
    return b"%x\\r\\n%b\\r\\n" % (len(data), data)
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
TOKEN = event([{"index": 0, "text": "token "}])
USAGE = {"prompt_tokens": 100, "completion_tokens": 16, "prompt_tokens_details": {"cached_tokens": 0}}
LAST = event([{"index": 0, "text": "", "finish_reason": "length"}]) + event([], usage=USAGE)
END = b"e\\r\\ndata: [DONE]\\n\\n\\r\\n0\\r\\n\\r\\n"
async def answer(reader, writer):
    try:
        while head := await reader.readuntil(b"\\r\\n\\r\\n"):
            lines = head.lower().split(b"\\r\\n")
            length = next((int(l[15:]) for l in lines if l.startswith(b"content-length:")), 0)
            body = await reader.readexactly(length)
            if b"completions" not in lines[0]:
                found = b"200 OK" if b"reset" in lines[0] else b"404 Not Found"
                writer.write(b"HTTP/1.1 " + found + b"\\r\\ncontent-length: 0\\r\\n\\r\\n")
                continue
            await asyncio.sleep(prefill)
            tokens = 1 if b'"max_tokens":1,' in body else 16
            last = LAST.replace(b'"completion_tokens": 16', b'"completion_tokens": %2d' % tokens)
            writer.write(HEAD)
            for _ in range(tokens):
                writer.write(TOKEN)
                await writer.drain()
            writer.write(last + END)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def settings(url: str) -> EngineSettings:
    return EngineSettings(model="m", options={"base-url": url, "reset": "vllm", "reference": "reset"})


def bare(url: str, trace: Trace) -> float:
    """Seconds a request of an httpx loop that reads each stream to its end."""
    wordings, manner = Wordings(), Manner("m", "auto", 0)
    asked = [
        manner.question(wordings.request(request).wording, Sampling(request.max_tokens)) for request in trace.requests
    ]
    with httpx.Client() as client:
        started = perf_counter()
        for path, body in asked:
            headers = {"content-type": "application/json"}
            with client.stream("POST", url + path, content=body, headers=headers) as response:
                for _ in response.iter_bytes():
                    pass
        return (perf_counter() - started) / len(asked)


def engine_alone(url: str, trace: Trace) -> float:
    engine, wordings, policy = open_engine(settings(url)), Wordings(), AsServed()
    started = perf_counter()
    for request in trace.requests:
        prompt = wordings.request(request)
        engine.serve(request.request_id, "request", prompt, Sampling(request.max_tokens), policy)
    seconds = (perf_counter() - started) / len(trace.requests)
    engine.close()
    return seconds


class Clock(Silent):
    """When each request of an arm was done, for the arms that keep their history."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self._arm: list[float] = []

    def arm(self, arm_id: str, number: int, arms: int) -> None:
        kept = arm_id.startswith(AS_SERVED) and not arm_id.endswith("reset")
        self._arm = self.times.setdefault(arm_id, []) if kept else []

    def served(self) -> None:
        self._arm.append(perf_counter())

    def seconds(self) -> float:
        spans = [times[-1] - times[0] for times in self.times.values()]
        return sum(spans) / sum(len(times) - 1 for times in self.times.values())


def in_a_replay(url: str, trace: Trace) -> float:
    """From one request's end to the next one's, in arms that keep their history: serving and writing rows."""
    plan, clock = make_plan(len(trace.requests), "server", settings(url), (), 2), Clock()
    manifest = new_manifest(trace, plan, 0.0)
    with tempfile.TemporaryDirectory() as folder, open_folder(Path(folder) / "run", manifest) as run:
        replay(trace, lambda: open_engine(settings(url)), plan, run, clock)
    return clock.seconds()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=float, default=0.0)
    given = parser.parse_args()
    trace = rolling_trace(given.requests, window=8, max_tokens=16)
    command = [sys.executable, "-c", SERVER, str(given.prefill)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}/v1"
            ways = {"bare httpx": bare, "engine": engine_alone, "replay": in_a_replay}
            rounds = [{name: way(url, trace) for name, way in ways.items()} for _ in range(given.rounds)]
        finally:
            server.kill()
    base = statistics.median(one["bare httpx"] for one in rounds)
    for name in ways:
        median = statistics.median(one[name] for one in rounds)
        print(f"{name:<12} {1000 * median:7.3f} ms a request   {median / base:5.2f} x")


if __name__ == "__main__":
    main()
