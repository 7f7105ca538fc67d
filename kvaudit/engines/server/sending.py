"""One request to a server and its answer, or how it failed."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import orjson

from kvaudit.engines.server.asking import most_tokens
from kvaudit.engines.server.claims import Endings
from kvaudit.engines.server.flows import Clock, Flow
from kvaudit.engines.server.jsons import as_object, parsed, value_in, with_texts
from kvaudit.engines.server.keys import sought, without
from kvaudit.engines.server.replies import AttemptError, Failing, Reply
from kvaudit.engines.server.saying import page_in, told_in, with_scheme
from kvaudit.errors import EngineError
from kvaudit.proxy.answers import ChatAnswer, CompletionAnswer
from kvaudit.proxy.streams import ServerSentEvents

_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0
"""Shorter than servers keep idle connections (5 s at uvicorn and llama.cpp)."""
_SHOWN = 500
"""Characters of what a server says that stand in an error."""
_EVENT_STREAM = "text/event-stream"
_END, _ERROR = b"[DONE]", b"error"
"""The data that ends a stream, and the name of an event that says what went wrong."""
_GIVEN_UP = frozenset({"abort", "error"})
"""Finish reasons of vLLM and SGLang for an answer that is not whole."""


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
        self._endings = Endings(base_url)
        keys = [key] if key else []
        self._in_answers, self._in_errors = sought(keys), sought(keys, in_errors=True)
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
        return without(text, self._in_answers)

    def cleaned(self, text: str) -> str:
        """What a server said, for an error: without the key, and not too long."""
        page = page_in(text)
        return " ".join(without(page or text, self._in_errors).split())[:_SHOWN]

    def call(self, method: str, url: str, body: str = "", seconds: float | None = None) -> tuple[int, str]:
        """Status and body of a call that is no question; `seconds`: as `timeout`, for this one.

        Raises AttemptError where there is no answer.
        """
        headers = self._headers(url) | ({"content-type": "application/json"} if body else {})
        client = self._looking if method == "GET" else self._acting
        seconds = self._timeout if seconds is None else seconds
        asked = client.stream(
            method,
            url,
            content=body.encode() or None,
            headers=headers,
            timeout=httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS)),
        )
        with self._failures(url), asked as response:
            text = _read(response, Flow(None, seconds)).decode(response.encoding or "utf-8", errors="replace")
            if response.is_redirect:
                text = told_in(response.status_code, response.headers, b"")
            value = value_in(text) if self._in_answers else None
            if isinstance(value, dict | list):
                text = orjson.dumps(with_texts(value, self.without_key)).decode()
            return response.status_code, text

    def found(self, path: str) -> str | None:
        """The body of a page of the server's; None where it has no such page. Raises AttemptError as `call`."""
        status, text = self.call("GET", self.root(path))
        return text if status == 200 else None

    def ask(self, path: str, body: bytes) -> Reply:
        """Raises AttemptError for anything but an answer that is whole, EngineError for a server whose answers cannot
        be told to be whole, or never end.
        """
        reply = Reply(ChatAnswer() if path.startswith("/chat") else CompletionAnswer())
        try:
            limit = most_tokens(body)
            self._take_answer(f"{self.base_url}{path}", body, reply, Flow(limit, self._timeout))
            self._check_whole(reply, limit)
        except AttemptError as error:
            error.url = self.base_url
            raise
        return reply

    def _take_answer(self, url: str, body: bytes, reply: Reply, flow: Flow) -> None:
        headers = self._headers(url) | {"content-type": "application/json"}
        clock = Clock()
        asked = self._acting.stream("POST", url, content=body, headers=headers, extensions={"trace": clock})
        with self._failures(url), asked as response:
            flow.begin()
            if response.status_code != 200:
                raise self._rejected(response, _read(response, flow))
            if response.headers.get("content-type", "").startswith(_EVENT_STREAM):
                self._take_events(response, reply, flow, clock)
            else:
                reply.take(self._whole(_read(response, flow)), whole=True)
            reply.total_ms = reply.total_ms or clock.milliseconds()

    def _take_events(self, response: httpx.Response, reply: Reply, flow: Flow, clock: Clock) -> None:
        """What comes behind the end, or that nothing comes there, does not matter.

        Where nothing but its finish reason tells it, the answer took until its latest content came.
        """
        splitter = ServerSentEvents()
        try:
            for chunk in response.iter_bytes():
                for data in splitter.feed(chunk):
                    self._take_event(splitter.name, data, reply, flow, clock)
                if reply.ended:
                    return
                flow.take(chunk)
                if flow.is_silent and reply.answer.finished:
                    break
                self._check_flow(flow)
        except httpx.HTTPError:
            if not (reply.ended or reply.answer.finished):
                raise
        for data in splitter.finish():
            self._take_event(splitter.name, data, reply, flow, clock)
        if not reply.ended:
            reply.total_ms = clock.milliseconds(flow.latest)

    def _take_event(self, name: bytes, data: bytes, reply: Reply, flow: Flow, clock: Clock) -> None:
        if data.strip() == _END:
            reply.ended = True
            reply.total_ms = clock.milliseconds()
        elif name == _ERROR:
            reply.answer.error = reply.answer.error or told_in(200, {}, data) or "an error without words"
        elif reply.take(self._parsed(data)):
            flow.told()
            reply.ttft_ms = clock.milliseconds(flow.latest) if reply.ttft_ms is None else reply.ttft_ms

    def _check_flow(self, flow: Flow) -> None:
        if flow.is_endless:
            raise EngineError(
                f"the server at {self.base_url} does not end an answer that may have {flow.limit} tokens",
                "look whether it heeds max_tokens",
            )
        if flow.is_silent:
            raise AttemptError("slow", "nothing came within the time limit")

    def _check_whole(self, reply: Reply, limit: int | None) -> None:
        answer = reply.answer
        if answer.error:
            raise AttemptError("broken", self.cleaned(answer.error), 200)
        if not (reply.ended or answer.finished):
            raise AttemptError("lost", "the answer broke off before its end")
        if any(choice.finish_reason in _GIVEN_UP for choice in answer.choices.values()):
            raise AttemptError("broken", "the server gave the answer up", 200)
        if doubt := self._endings.doubt(reply, limit):
            raise AttemptError("lost", doubt)

    def _parsed(self, data: bytes) -> Mapping[str, Any]:
        """Raises orjson.JSONDecodeError."""
        value = parsed(data)
        return as_object(with_texts(value, self.without_key) if self._in_answers else value)

    def _whole(self, body: bytes) -> Mapping[str, Any]:
        """Raises as `_parsed`, AttemptError for a web page."""
        if page := page_in(body.decode(errors="replace")):
            raise AttemptError("broken", f"{self.cleaned(page)} came in place of an answer", 200)
        return self._parsed(body)

    def _headers(self, url: str) -> dict[str, str]:
        own = httpx.URL(self.base_url)
        to = httpx.URL(url)
        same = (own.scheme, own.host, own.port) == (to.scheme, to.host, to.port)
        return {"authorization": f"Bearer {self._key}"} if self._key and same else {}

    @contextmanager
    def _failures(self, url: str) -> Iterator[None]:
        """Turns what httpx raises into AttemptError."""

        def said(error: Exception) -> str:
            return self.cleaned(with_scheme(url, str(error))) or type(error).__name__

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise AttemptError("gone", f"no connection: {said(error)}") from error
        except httpx.TimeoutException as error:
            raise AttemptError("slow", "nothing came within the time limit") from error
        except orjson.JSONDecodeError as error:
            raise AttemptError("broken", f"the answer is no JSON: {said(error)}", 200) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AttemptError("lost", f"the connection broke: {said(error)}") from error

    def _rejected(self, response: httpx.Response, content: bytes) -> AttemptError:
        status = response.status_code
        told = told_in(status, response.headers, content)
        said = f"status {status}" + (f": {self.cleaned(told)}" if told.strip() else "")
        kind: Failing = "busy" if status in (429, 503) else "broken" if status >= 500 else "refused"
        return AttemptError(kind, said, status, _seconds(response.headers.get("retry-after", "")))


def _read(response: httpx.Response, flow: Flow) -> bytes:
    """A body that is taken whole. Raises AttemptError for one that is not there in time, or has no end."""
    chunks = []
    for chunk in response.iter_bytes():
        chunks.append(chunk)
        flow.take(chunk)
        if flow.is_endless:
            raise AttemptError("broken", "the answer is too long to be one", response.status_code)
        if flow.is_silent:
            raise AttemptError("slow", "the answer was not whole within the time limit")
    return b"".join(chunks)


def _seconds(text: str) -> float | None:
    try:
        return max(0.0, float(text))
    except ValueError:
        return None
