"""A server that speaks OpenAI's API over a cache with the planted faults of engines/scripted, on loopback.

Prompts are split into chunks at " # # ", as CacheBlend splits them at its separator; a cache_salt keeps a request apart
from the cache. What it tells and how it fails is told by `Behaviour`. As a process of its own it can die for good:

    python faulty_server.py PORT NUMBER-OF-THE-QUESTION-AT-WHICH-IT-DIES
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.scripted import ByteTokenizer, ScriptedEngine
from kvaudit.policies.bounds import ReuseAll
from kvaudit.records import Prompt, PromptSegment, Reference, Sampling, Served

SEPARATOR = " # # "
KEY = "sk-the-key-of-the-server-0123456789"
Failure = Callable[[], Response]


@dataclass
class Behaviour:
    """`counters`: where cached tokens are told: usage, timings, metrics or nowhere. `failures`: by the number of the
    question (from 0, all attempts counted), what is done in place of an answer. `slow_prefill`: seconds a prompt that
    is not cached takes. `refuses`: fields that it answers with 400. `least_cached`: shorter ones are not cached.
    `bare_metrics`: neither when it started nor how much it answered is told. `uncounted`: its
    cache is none that `counters` knows, they say 0. `head`: so many tokens begin every prompt, and are cached behind
    the first one since a reset; `warms_up`: from the reset on, by a prompt of the server's own. `tells`: what stands in
    its usage for so many cached tokens. `root`: what its model's files are called, None where it does not say;
    `loaded`: the same, told beside the version. `template`: so many tokens more are in each prompt."""

    counters: str = "usage"
    salts: bool = True
    shows_ids: bool = False
    model: str = "m"
    answers_as: str = "m"
    version: str = "1.0"
    started: float = 1000.0
    key: str | None = None
    busy_resets: int = 0
    refused_reset: bool = False
    slow_prefill: float = 0.0
    slow_answers: float = 0.0
    capacity: int | None = None
    apis: tuple[str, ...] = ("chat", "completions")
    refuses: tuple[str, ...] = ()
    failures: dict[int, Any] = field(default_factory=dict)
    models_listed: bool = True
    foreign: int = 0
    newer_limit: bool = False
    unready: int = 0
    least_cached: int = 0
    bare_metrics: bool = False
    uncounted: bool = False
    head: int = 0
    warms_up: bool = False
    tells: Callable[[int], Any] = int
    root: str | None = "weights"
    loaded: str | None = None
    template: int = 0


class FaultyServer:
    def __init__(self, fault: str, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        settings = EngineSettings(
            switches=Switches(capacity_bytes=behaviour.capacity), options={"fault": fault}, recompute_ratio=0.5
        )
        self.fault, self.engine = fault, ScriptedEngine(settings)
        self.engine.reset()
        self.times: dict[str, int] = {}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reset_headers: list[dict[str, str]] = []
        self.reset_paths: list[str] = []
        self.reset_bodies: list[str] = []
        self.at_once = self.most_at_once = self.at_once_when_salted = 0
        self.questions = self.answered = self.cached_total = self.resets = 0
        self.url = ""
        self.has_head = behaviour.warms_up

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
                Route("/reset_prefix_cache", self.reset, methods=["POST"]),
                Route("/slots", self.slots),
                Route("/slots/{slot}", self.reset, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        if self.behaviour.unready:
            self.behaviour.unready -= 1
            return JSONResponse({"error": "loading"}, 503)
        if not self.behaviour.models_listed:
            return JSONResponse({"detail": "Not Found"}, 404)
        root = {"root": self.behaviour.root} if self.behaviour.root else {}
        return JSONResponse({"object": "list", "data": [{"id": self.behaviour.model, **root}]})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self.behaviour.version, "model_path": self.behaviour.loaded})

    async def metrics(self, request: Request) -> Response:
        if self.behaviour.counters not in ("metrics", "usage"):
            return PlainTextResponse("", 404)
        told = [
            "# HELP process_start_time_seconds Start time.",
            f"process_start_time_seconds {self.behaviour.started}",
            f'vllm:request_success_total{{finished_reason="stop"}} {self.answered + self.behaviour.foreign}',
            'vllm:request_success_total{finished_reason="length"} 0',
        ]
        lines = [] if self.behaviour.bare_metrics else told
        if self.behaviour.counters == "metrics":
            lines.append(f'vllm:prefix_cache_hits_total{{engine="0"}} {self.cached_total}')
        return PlainTextResponse("\n".join(lines) + "\n")

    async def slots(self, request: Request) -> Response:
        return JSONResponse([{"id": 0}, {"id": 1}])

    async def reset(self, request: Request) -> Response:
        if self.behaviour.busy_resets:
            self.behaviour.busy_resets -= 1
            return JSONResponse({"success": False})
        self.resets += 1
        self.reset_headers.append(dict(request.headers))
        self.reset_bodies.append((await request.body()).decode())
        self.reset_paths.append(request.url.path + (f"?{request.url.query}" if request.url.query else ""))
        self.engine.reset()
        self.has_head = self.behaviour.warms_up or (self.has_head and self.fault == "hidden-stale-cache")
        if self.fault != "hidden-stale-cache":
            self.times.clear()
        if self.fault == "stale-cache" or self.behaviour.refused_reset:
            return JSONResponse({"success": False})
        return JSONResponse({"success": True})

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, "completions")

    async def _answer(self, request: Request, api: str) -> Response:
        body = await request.json()
        if self.behaviour.key and request.headers.get("authorization") != f"Bearer {self.behaviour.key}":
            said = request.headers.get("authorization")
            return JSONResponse({"error": {"message": f"wrong key: {said}"}}, 401)
        if api not in self.behaviour.apis:
            return JSONResponse({"detail": "Not Found"}, 404)
        if refused := [name for name in self.behaviour.refuses if name in body]:
            return JSONResponse({"error": {"message": f"unknown field {refused[0]}"}}, 400)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        number, self.questions = self.questions, self.questions + 1
        failure = self.behaviour.failures.get(number)
        if failure is not None and failure != "cut":
            return failure()
        text = body["prompt"] if api == "completions" else "".join(m["content"] for m in body["messages"])
        try:
            served = self._served(text, body)
        except RuntimeError as error:
            return JSONResponse({"error": {"message": str(error)}}, 500)
        if self.has_head and "cache_salt" not in body:
            served = replace(served, reused_tokens=served.reused_tokens + self.behaviour.head)
        self.has_head = True
        if self.behaviour.slow_prefill and not served.reused_tokens:
            await anyio.sleep(self.behaviour.slow_prefill)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if "cache_salt" in body:
            self.at_once_when_salted = max(self.at_once_when_salted, self.at_once)
        await anyio.sleep(self.behaviour.slow_answers)
        self.at_once -= 1
        self.answered += 1
        self.cached_total += served.reused_tokens
        events = self._events(api, body, served)
        return StreamingResponse(self._streamed(events, cut=failure == "cut"), media_type="text/event-stream")

    async def _streamed(self, events: list[dict[str, Any]], *, cut: bool) -> AsyncIterator[bytes]:
        for event in events[:2] if cut else events:
            yield f"data: {json.dumps(event)}\n\n".encode()
        if cut:
            raise OSError("the planted cut")
        yield b"data: [DONE]\n\n"

    def _events(self, api: str, body: dict[str, Any], served: Served) -> list[dict[str, Any]]:
        def event(text: str | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            choice |= {"text": text or ""} if api == "completions" else {"delta": {"content": text} if text else {}}
            if text and self.behaviour.shows_ids and body.get("return_token_ids"):
                choice["token_ids"] = list(text.encode())
            return {"id": "1", "model": self.behaviour.answers_as, "choices": [choice], **more}

        events = [event(letter) for letter in served.answer_text]
        timings = (
            {"timings": {"cache_n": 0 if self.behaviour.uncounted else served.reused_tokens}}
            if self.behaviour.counters == "timings"
            else {}
        )
        events.append(event(None, served.finish_reason, **timings))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage: dict[str, Any] = {
                "prompt_tokens": served.prompt_tokens + self.behaviour.head + self.behaviour.template,
                "completion_tokens": len(served.answer_text),
            }
            if self.behaviour.counters == "usage":
                told = {"cached_tokens": self.behaviour.tells(served.reused_tokens)}
                usage["prompt_tokens_details"] = told if served.reused_tokens else None
            events.append({**event(None), "choices": [], "usage": usage})
        return events

    def _served(self, text: str | list[int], body: dict[str, Any]) -> Served:
        prompt = _chunked(text)
        name = sha256(repr(prompt.token_ids).encode()).hexdigest()[:12]
        self.times[name] = self.times.get(name, 0) + 1
        salted = (self.behaviour.salts and "cache_salt" in body) or len(text) < self.behaviour.least_cached
        return self.engine.serve(
            f"{name}-{self.times[name]}",
            "request",
            prompt,
            Sampling(
                body["max_completion_tokens" if self.behaviour.newer_limit else "max_tokens"],
                tuple(body.get("stop", ())),
            ),
            None if salted else ReuseAll(),
            None if salted else Reference(()),
        )


def _chunked(text: str | list[int]) -> Prompt:
    if isinstance(text, list):
        return Prompt(tuple(text), (PromptSegment("document", sha256(repr(text).encode()).hexdigest(), 0, len(text)),))
    segments, ids = list[PromptSegment](), list[int]()
    for number, chunk in enumerate(text.split(SEPARATOR)):
        for kind, part in (*((("separator", SEPARATOR),) if number else ()), ("document", chunk)):
            if part:
                end = len(ids) + len(part.encode())
                segments.append(PromptSegment(kind, sha256(part.encode()).hexdigest(), len(ids), end))
                ids += ByteTokenizer().encode(part)
    return Prompt(tuple(ids), tuple(segments))


@contextmanager
def faulty_server(fault: str = "none", certificate: Path | None = None, **behaviour: Any) -> Iterator[FaultyServer]:
    """The server, which answers on loopback while the block runs; `url` ends in /v1. `certificate`: beside key.pem."""
    server = FaultyServer(fault, Behaviour(**behaviour))
    with running(server.app(), certificate) as address:
        server.url = f"http{'s' if certificate else ''}://{address}/v1"
        yield server


@contextmanager
def running(app: Starlette, certificate: Path | None = None, port: int = 0) -> Iterator[str]:
    """HOST:PORT of an app in a thread of its own."""
    listening = _listening(port)
    secured = {"ssl_certfile": certificate, "ssl_keyfile": certificate.with_name("key.pem")} if certificate else {}
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, **secured)
    served = uvicorn.Server(config)
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not served.started:
            time.sleep(0.005)
        yield "{}:{}".format(*listening.getsockname()[:2])
    finally:
        served.should_exit = True
        thread.join(10)
        listening.close()


def _listening(port: int) -> socket.socket:
    """By its protocol asyncio knows that small answers are not to be held back (40 ms each, otherwise)."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening


if __name__ == "__main__":
    dying = Behaviour(started=time.time(), failures={int(sys.argv[2]): lambda: os._exit(1)})
    with running(FaultyServer("none", dying).app(), port=int(sys.argv[1])) as told:
        sys.stdout.write(f"{told}\n")
        sys.stdout.flush()
        threading.Event().wait()
