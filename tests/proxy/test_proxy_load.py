"""Hundreds of streams at once, and prompts of 1.5 MB, in bounded memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
from proxy_processes import recorded, running_proxy, running_service
from proxy_service import WORDS

STREAMS = 300
PROMPT = "All work and no play makes a long prompt. " * 36_000  # 1.5 MB
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"


async def ask(address: str, bodies: list[bytes], at_once: int) -> list[bytes]:
    """Through sockets alone: a client library would be slower than the proxy."""
    host, port = address.split(":")
    free = asyncio.Semaphore(at_once)

    async def one(body: bytes) -> bytes:
        async with free:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(HEAD % len(body) + body)
            answer = await reader.read()
            writer.close()
            return answer

    return await asyncio.wait_for(asyncio.gather(*map(one, bodies)), 60)


def body(number: int, model: str, prompt: str) -> bytes:
    messages = [{"role": "user", "content": f"{number}: {prompt}"}]
    return orjson.dumps({"model": model, "stream": True, "messages": messages, "session_id": f"s{number}"})


def test_hundreds_of_streams_at_once_are_each_recorded_once(tmp_path: Path) -> None:
    capture = tmp_path / "capture.jsonl.zst"
    bodies = [body(number, "paced", "Hello") for number in range(STREAMS)]
    with running_service() as service, running_proxy(f"http://{service}", capture) as proxy:
        answers = asyncio.run(ask(proxy.address, bodies, STREAMS))
        exchanges = recorded(capture, STREAMS)

    assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in answers)
    assert {exchange["session"] for exchange in exchanges} == {f"s{number}" for number in range(STREAMS)}
    assert {exchange["answer"]["choices"][0]["text"] for exchange in exchanges} == {"".join(WORDS)}
    assert {exchange["outcome"] for exchange in exchanges} == {"complete"}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_long_prompts(tmp_path: Path) -> None:
    capture = tmp_path / "capture.jsonl.zst"
    with running_service() as service, running_proxy(f"http://{service}", capture) as proxy:
        asyncio.run(ask(proxy.address, [body(number, "m", PROMPT) for number in range(20)], 4))
        recorded(capture, 20)
        before = proxy.resident_bytes()
        for start in range(20, 220, 50):
            asyncio.run(ask(proxy.address, [body(number, "m", PROMPT) for number in range(start, start + 50)], 4))
        recorded(capture, 220)
        grown = proxy.resident_bytes() - before

    assert grown < 40 << 20  # the prompts are 300 MB
