"""A server that speaks OpenAI's and Anthropic's APIs, for the proxy to stand in front of.

    python proxy_service.py PORT [CERTIFICATE KEY]

What it answers is told by the request's `model`. Run as a process of its own, so that bytes really pass through
sockets. `/control/open` lets a gated stream go on, and tells how many answers were cut and how many bytes flowed.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

SECRET = "sk-this-is-a-very-secret-key-0123456789"
WORDS = ["The ", "answer ", "is ", "42", "."]
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 5,
    "total_tokens": 105,
    "prompt_tokens_details": {"cached_tokens": 64},
}
ITS_OWN = (b"host", b"connection", b"transfer-encoding")
"""Headers that a proxy has to set anew, and that no answer tells."""

STATE: dict[str, Any] = {"cut": 0, "sent": 0, "gate": asyncio.Event()}


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


def chat_chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}


def chat_events(body: dict[str, Any]) -> list[bytes]:
    events = [b": keep-alive\n\n", sse(chat_chunk(None)), sse(chat_chunk({"role": "assistant", "content": ""}))]
    events += [sse(chat_chunk({"content": word})) for word in WORDS]
    events.append(sse(chat_chunk({}, "stop")))
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(sse(chat_chunk(None, usage=USAGE)))
    return [*events, sse(b"[DONE]")]


async def paced(events: list[bytes], seconds: float) -> AsyncIterator[bytes]:
    try:
        for event in events:
            yield event
            await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        STATE["cut"] += 1
        raise


async def until_let_go(events: list[bytes]) -> AsyncIterator[bytes]:
    STATE["gate"].clear()
    for event in events[:-1]:
        yield event
    await asyncio.wait_for(STATE["gate"].wait(), 10)
    yield events[-1]


async def flood() -> AsyncIterator[bytes]:
    """79 MB, to a client that may not read."""
    chunk = sse(chat_chunk({"content": "x" * 65536}))
    for _ in range(1200):
        STATE["sent"] += len(chunk)
        yield chunk


async def broken(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events[:5]:
        yield event
        await asyncio.sleep(0)
    raise ConnectionResetError("planned")


async def chat(request: Request) -> Response:
    raw = await request.body()
    if request.headers.get("content-encoding") == "gzip":
        raw = gzip.decompress(raw)
    body = json.loads(raw)
    events = chat_events(body)
    model = body.get("model")
    if model == "fails":
        return JSONResponse({"error": {"message": "the model is overloaded"}}, 503)
    if model == "fails-with-200":
        return JSONResponse({"error": {"message": "out of memory", "code": 500}})
    if model == "no-success":
        return JSONResponse({"success": False, "message": "nothing was done"})
    if model == "echoes-key":
        return JSONResponse({"error": {"message": f"bad {request.headers.get('authorization')}"}}, 401)
    if model == "never":
        await request.receive()  # ends when the client goes
        STATE["cut"] += 1
        return Response()
    if body.get("stream"):
        streams = {
            "gated": lambda: until_let_go(events),
            "slow": lambda: paced(events, 0.2),
            "endless": lambda: paced(events * 1000, 0.05),
            "flood": flood,
            "broken": lambda: broken(events),
            "no-end": lambda: paced(events[:5], 0),
            "paced": lambda: paced(events, 0.01),
        }
        if model == "gzip":
            data = gzip.compress(b"".join(events), mtime=0)
            return Response(data, headers={"content-type": "text/event-stream", "content-encoding": "gzip"})
        made = streams.get(model, lambda: paced(events, 0))()
        return StreamingResponse(made, media_type="text/event-stream; charset=utf-8")
    message = {"role": "assistant", "content": "".join(WORDS)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "chat-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return JSONResponse(answer | {"usage": USAGE}, headers={"set-cookie": f"session={SECRET}"})


async def completions(request: Request) -> Response:
    body = await request.json()
    parts = [{"id": "c-1", "object": "text_completion", "choices": [{"index": 0, "text": w}]} for w in WORDS]
    parts[-1]["choices"][0]["finish_reason"] = "length"  # type: ignore[index]
    if body.get("stream"):
        return StreamingResponse(paced([*map(sse, parts), sse(b"[DONE]")], 0), media_type="text/event-stream")
    choice = {"index": 0, "text": "".join(WORDS), "finish_reason": "length", "logprobs": None}
    whole = {"id": "c-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return JSONResponse(whole | {"usage": USAGE})


def response_object(status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": status,
        "output": output,
        "error": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 10,
            "output_tokens": 5,
            "total_tokens": 15,
            "input_tokens_details": {"cached_tokens": 8},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def responses(request: Request) -> Response:
    body = await request.json()
    part = {"type": "output_text", "text": "".join(WORDS), "annotations": []}
    item = {"type": "message", "id": "i1", "role": "assistant", "status": "completed", "content": [part]}
    whole = response_object("completed", [item])
    if not body.get("stream"):
        return JSONResponse(whole)
    deltas = [
        {"type": "response.output_text.delta", "item_id": "i1", "output_index": 0, "content_index": 0, "delta": word}
        for word in WORDS
    ]
    events = [
        {"type": "response.created", "response": response_object("in_progress", [])},
        *deltas,
        {"type": "response.completed", "response": whole},
    ]
    chunks = [b"event: %s\n" % str(e["type"]).encode() + sse(e | {"sequence_number": n}) for n, e in enumerate(events)]
    return StreamingResponse(paced(chunks, 0), media_type="text/event-stream")


async def messages(request: Request) -> Response:
    body = await request.json()
    usage = {"input_tokens": 7, "output_tokens": 1, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 5}
    start = {"id": "msg-1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    if not body.get("stream"):
        content = [{"type": "text", "text": "".join(WORDS)}]
        return JSONResponse(start | {"content": content, "stop_reason": "end_turn", "stop_sequence": None})
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in WORDS
    ]
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    chunks = [b"event: %s\n" % str(e["type"]).encode() + sse(e) for e in events]
    return StreamingResponse(paced(chunks, 0), media_type="text/event-stream")


async def echo(request: Request) -> Response:
    """What came, told in the body and in headers of odd kinds."""
    body = await request.body()
    if request.url.path.endswith("/redirect"):
        return RedirectResponse("/v1/models", headers={"x-seen": "redirect"})
    if request.url.path.endswith("/nothing"):
        return Response(status_code=204)
    if request.url.path.endswith("/unchanged"):
        return Response(status_code=304, headers={"etag": '"x"'})
    told = {
        "method": request.method,
        "target": request.scope["raw_path"].decode() + "?" + request.scope["query_string"].decode("latin-1"),
        "headers": [
            [k.decode("latin-1"), v.decode("latin-1")] for k, v in request.scope["headers"] if k not in ITS_OWN
        ],
        "body": body.hex(),
    }
    answer = JSONResponse(told)
    answer.raw_headers += [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"x-latin", "é".encode("latin-1"))]
    return answer


async def control(request: Request) -> Response:
    if request.path_params["what"] == "open":
        STATE["gate"].set()
    return JSONResponse({"cut": STATE["cut"], "sent": STATE["sent"]})


class Everything:
    """Any method on any other path."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            response = await echo(Request(scope, receive))
        except ClientDisconnect:
            return
        await response(scope, receive, send)


app = Starlette(
    routes=[
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/control/{what}", control),
        Route("/{path:path}", Everything()),
    ]
)


def main() -> None:
    created = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=2048)
    listener = socket.socket(fileno=created.detach())  # knows that it is TCP, so that asyncio turns Nagle's delay off
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    tls = {} if len(sys.argv) < 4 else {"ssl_certfile": sys.argv[2], "ssl_keyfile": sys.argv[3]}
    config = uvicorn.Config(app, log_level="critical", lifespan="off", date_header=False, http="h11", **tls)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
