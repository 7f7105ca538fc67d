"""One request to a server and its answer, or how it failed."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import httpx
import orjson

from kvaudit.engines.server.jsons import as_object, object_in, parsed
from kvaudit.proxy.answers import Answer, ChatAnswer, CompletionAnswer, error_in
from kvaudit.proxy.streams import ServerSentEvents

Failing = Literal["gone", "lost", "slow", "busy", "broken", "refused"]
"""`gone`: nobody takes connections. `lost`: the connection broke before the answer was whole. `slow`: nothing came in
time. `busy`: 429 or 503. `broken`: another 5xx, or an error in place of an answer. `refused`: another 4xx."""

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0
"""Shorter than servers keep idle connections (5 s at uvicorn and llama.cpp)."""
_QUESTION_STARTS = "http11.send_request_headers.started"
_SHOWN = 500
"""Characters of what a server says that stand in an error."""
_EVENT_STREAM = "text/event-stream"
_END = b"[DONE]"
SECRET = "[secret removed]"
_GIVEN_UP = frozenset({"abort", "error"})
"""Finish reasons of vLLM and SGLang for an answer that is not whole."""


class AttemptError(Exception):
    """One attempt failed. `status` is the answer's, None where there was none; `wait`: seconds that it asks for."""

    def __init__(self, kind: Failing, told: str, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(told)
        self.kind, self.told, self.status, self.wait = kind, told, status, wait


@dataclass(slots=True)
class Reply:
    """What a server answered. Times in milliseconds from when the request was sent; `ttft_ms` to the first content."""

    answer: Answer
    token_ids: list[int] = field(default_factory=list)
    timings: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    ended: bool = False
    ttft_ms: float | None = None
    total_ms: float = 0.0

    def take(self, event: Mapping[str, Any], *, whole: bool = False) -> bool:
        """One event of a stream, or a whole body; whether it brought content."""
        if isinstance(event.get("timings"), dict):
            self.timings = event["timings"]
        if isinstance(event.get("system_fingerprint"), str):
            self.fingerprint = event["system_fingerprint"]
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            ids = choice.get("token_ids") if isinstance(choice, dict) else None
            if isinstance(ids, list) and all(type(token) is int for token in ids):
                self.token_ids += ids
        if whole:
            self.answer.set_whole(event)
            return True
        return self.answer.add_event(event)


class Connection:
    """Requests to one server.

    Connections are kept for GETs alone. llama.cpp closes many after a stream, and a request that meets a closing one is
    lost: to send it again would change the history.
    """

    def __init__(self, base_url: str, key: str | None, verify: ssl.SSLContext, timeout: float) -> None:
        """`timeout`: seconds in which something has to come. The key goes to this server's host alone."""
        self.base_url = base_url
        self._root = base_url.removesuffix("/v1")
        self._key, self._verify, self._timeout = key, verify, timeout
        self._open()

    def _open(self) -> None:
        headers = {"accept-encoding": "identity", "user-agent": "kvaudit"}
        timeout = httpx.Timeout(self._timeout, connect=_CONNECT_SECONDS)

        def client(kept: int) -> httpx.Client:
            limits = httpx.Limits(max_keepalive_connections=kept, keepalive_expiry=_IDLE_SECONDS)
            return httpx.Client(headers=headers, verify=self._verify, timeout=timeout, limits=limits)

        self._looking, self._acting = client(1), client(0)

    def close(self) -> None:
        self._looking.close()
        self._acting.close()

    def reconnect(self) -> None:
        """Forget connections to a server that is no longer the same process."""
        self.close()
        self._open()

    def root(self, path: str) -> str:
        return f"{self._root}{path}"

    def without_key(self, text: str) -> str:
        return without(text, [self._key] if self._key else [])

    def cleaned(self, text: str) -> str:
        """What a server said, without the key and not too long."""
        return " ".join(self.without_key(text).split())[:_SHOWN]

    def call(self, method: str, url: str, body: str = "", seconds: float | None = None) -> tuple[int, str]:
        """Status and body of a call that is no question; `seconds`: as `timeout`, for this one.

        Raises AttemptError where there is no answer.
        """
        headers = self._headers(url) | ({"content-type": "application/json"} if body else {})
        client = self._looking if method == "GET" else self._acting
        with self._failures():
            response = client.request(
                method,
                url,
                content=body.encode() or None,
                headers=headers,
                timeout=httpx.Timeout(seconds or self._timeout, connect=_CONNECT_SECONDS),
            )
            return response.status_code, self.without_key(response.text)

    def found(self, path: str) -> str | None:
        """The body of a page of the server's; None where it has no such page. Raises AttemptError as `call`."""
        status, text = self.call("GET", self.root(path))
        return text if status == 200 else None

    def ask(self, path: str, body: bytes) -> Reply:
        """Raises AttemptError for anything but an answer that is whole."""
        answer: Answer = ChatAnswer() if path.startswith("/chat") else CompletionAnswer()
        reply, url = Reply(answer), f"{self.base_url}{path}"
        headers = self._headers(url) | {"content-type": "application/json"}
        clock = _Clock()
        asked = self._acting.stream("POST", url, content=body, headers=headers, extensions={"trace": clock})
        with self._failures(), asked as response:
            if response.status_code != 200:
                response.read()
                raise self._rejected(response)
            if response.headers.get("content-type", "").startswith(_EVENT_STREAM):
                for event in self._events(response, reply):
                    if reply.take(event) and reply.ttft_ms is None:
                        reply.ttft_ms = clock.milliseconds()
            else:
                reply.take(self._parsed(response.read()), whole=True)
                reply.ended = True
        reply.total_ms = clock.milliseconds()
        if answer.error:
            raise AttemptError("broken", self.cleaned(answer.error), 200)
        if not (reply.ended or answer.finished):
            raise AttemptError("lost", "the answer broke off before its end")
        if any(choice.finish_reason in _GIVEN_UP for choice in answer.choices.values()):
            raise AttemptError("broken", "the server gave the answer up", 200)
        return reply

    def _events(self, response: httpx.Response, reply: Reply) -> Iterator[Mapping[str, Any]]:
        splitter = ServerSentEvents()
        pieces = (splitter.feed(chunk) for chunk in response.iter_bytes())
        for data in chain(chain.from_iterable(self._told_in_time(pieces)), splitter.finish()):
            if data.strip() == _END:
                reply.ended = True
            else:
                yield self._parsed(data)

    def _told_in_time(self, pieces: Iterable[Iterator[bytes]]) -> Iterator[list[bytes]]:
        """Comments that keep a connection open are nothing that is told."""
        latest = time.perf_counter()
        for events in map(list, pieces):
            now = time.perf_counter()
            latest = now if events else latest
            if now - latest > self._timeout:
                raise AttemptError("slow", "nothing came within the time limit")
            yield events

    def _parsed(self, data: bytes) -> Mapping[str, Any]:
        """Raises orjson.JSONDecodeError."""
        key = (self._key or "").encode()
        return as_object(parsed(data.replace(key, SECRET.encode()) if key else data))

    def _headers(self, url: str) -> dict[str, str]:
        own = httpx.URL(self.base_url)
        to = httpx.URL(url)
        same = (own.scheme, own.host, own.port) == (to.scheme, to.host, to.port)
        return {"authorization": f"Bearer {self._key}"} if self._key and same else {}

    def _failures(self) -> _Failures:
        return _Failures(self)

    def _rejected(self, response: httpx.Response) -> AttemptError:
        status = response.status_code
        body = object_in(response.content)
        told = error_in(body) or str(body.get("detail") or "") or response.text
        said = f"status {status}" + (f": {self.cleaned(told)}" if told.strip() else "")
        kind: Failing = "busy" if status in (429, 503) else "broken" if status >= 500 else "refused"
        return AttemptError(kind, said, status, _seconds(response.headers.get("retry-after", "")))


class _Clock:
    """Runs from when the request is sent: how long the connection took is no time of the server's."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self, event: str, _: Mapping[str, Any]) -> None:
        if event == _QUESTION_STARTS:
            self._started = time.perf_counter()

    def milliseconds(self) -> float:
        return 1000 * (time.perf_counter() - self._started)


class _Failures:
    """Turns what httpx raises into AttemptError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, httpx.HTTPError | httpx.InvalidURL | orjson.JSONDecodeError):
            return
        said = self._connection.cleaned(str(error)) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise AttemptError("gone", f"no connection: {said}") from error
        if isinstance(error, httpx.TimeoutException):
            raise AttemptError("slow", "nothing came within the time limit") from error
        if isinstance(error, orjson.JSONDecodeError):
            raise AttemptError("broken", f"the answer is no JSON: {said}", 200) from error
        raise AttemptError("lost", f"the connection broke: {said}") from error


def without(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, SECRET)
    return text


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
