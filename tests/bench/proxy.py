"""What the recording proxy adds: time to the first token, and throughput, against the same server without it.

    python tests/bench/proxy.py [--streams 200] [--rounds 3]

A server in a process of its own streams chat completions to the openai client, directly and through the proxy, in
turns in one run. Latency: streams begin one after the other within 5 s and last 7.5 s, so that for a while all of them
are open, and nothing is saturated by their beginning. Throughput: all streams begin at once, and the server sends as
fast as it can. What is told is the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import httpx
import openai

sys.path.insert(0, str(Path(__file__).parents[1]))
from proxy_processes import exchanges_in, running_proxy


@dataclass(frozen=True)
class Load:
    """`pause` between tokens and the time `within` which streams begin, in seconds."""

    tokens: int
    pause: float
    within: float


STEADY = Load(tokens=15, pause=0.5, within=5.0)
SATURATED = Load(tokens=50, pause=0.0, within=0.0)

SERVER = """
import asyncio, json, sys
tokens, pause = int(sys.argv[1]), float(sys.argv[2])
def sse(delta, finish=None):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    data = b"data: " + json.dumps(chunk).encode() + b"\\n\\n"
    return b"%x\\r\\n%b\\r\\n" % (len(data), data)
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
TOKEN, LAST = sse({"content": "token "}), sse({}, "stop") + b"e\\r\\ndata: [DONE]\\n\\n\\r\\n0\\r\\n\\r\\n"
async def answer(reader, writer):
    try:
        while head := await reader.readuntil(b"\\r\\n\\r\\n"):
            length = next(int(l[15:]) for l in head.lower().split(b"\\r\\n") if l.startswith(b"content-length:"))
            await reader.readexactly(length)
            writer.write(HEAD)
            for _ in range(tokens):
                writer.write(TOKEN)
                await writer.drain()
                await asyncio.sleep(pause)
            writer.write(LAST)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
"""As little as streams chat completions, so that it is not the server that is measured."""


@contextmanager
def server(tokens: int, pause: float) -> Iterator[str]:
    command = [sys.executable, "-c", SERVER, str(tokens), str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def one_stream(client: openai.AsyncOpenAI, tokens: int, after: float = 0.0) -> float:
    """Milliseconds to the first token of a stream that begins `after` seconds."""
    await asyncio.sleep(after)
    began, first = perf_counter(), 0.0
    count = 0
    messages = [{"role": "user", "content": "x" * 2000}]
    stream = await client.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore[call-overload]
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            first = first or perf_counter() - began
            count += 1
    assert count == tokens
    return first * 1000


async def one_round(url: str, streams: int, tokens: int, within: float) -> tuple[list[float], float]:
    """Times to the first token in milliseconds, and tokens a second, of streams that begin `within` seconds."""
    transport = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", http_client=transport, max_retries=0) as client:
        await one_stream(client, tokens)
        began = perf_counter()
        starts = [within * number / streams for number in range(streams)]
        first = await asyncio.gather(*(one_stream(client, tokens, after) for after in starts))
        return first, streams * tokens / (perf_counter() - began)


def measured(load: Load, streams: int, rounds: int) -> tuple[dict[str, tuple[float, float, float]], float]:
    """Medians of TTFT p50, TTFT p95 (ms) and tokens a second; the proxy's processor time a stream (ms)."""
    figures: dict[str, list[tuple[float, float, float]]] = {"direct": [], "proxy": []}
    with tempfile.TemporaryDirectory() as folder, server(load.tokens, load.pause) as upstream:
        capture = Path(folder) / "capture.jsonl.zst"
        with running_proxy(upstream, capture) as proxy:
            used = proxy.processor_seconds()
            for _ in range(rounds):
                for name, url in (("direct", upstream), ("proxy", proxy.url)):
                    first, rate = asyncio.run(one_round(url, streams, load.tokens, load.within))
                    figures[name].append((statistics.median(first), statistics.quantiles(first, n=20)[-1], rate))
            used = (proxy.processor_seconds() - used) / (rounds * (streams + 1)) * 1000
            proxy.stop()
        assert len(exchanges_in(capture)) == rounds * (streams + 1)
    medians = {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in figures.items()}
    return medians, used  # type: ignore[return-value]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--streams", type=int, default=200)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    steady, used_steady = measured(STEADY, given.streams, given.rounds)
    saturated, used_saturated = measured(SATURATED, given.streams, given.rounds)
    print(f"{given.streams} streams, {given.rounds} rounds each, every exchange recorded")
    for what, figures, at, digits in (
        ("TTFT p50 (ms)", steady, 0, 2),
        ("TTFT p95 (ms)", steady, 1, 2),
        ("tokens/s, saturated", saturated, 2, 0),
    ):
        direct, proxied = figures["direct"][at], figures["proxy"][at]
        added = f"   added {proxied - direct:.{digits}f}" if figures is steady else ""
        print(
            f"{what:20} direct {direct:8.{digits}f}   proxy {proxied:8.{digits}f}   ratio {proxied / direct:.2f}{added}"
        )
    for load, used in ((STEADY, used_steady), (SATURATED, used_saturated)):
        print(f"processor time of the proxy: {used:.2f} ms a stream of {load.tokens} tokens")


if __name__ == "__main__":
    main()
