"""What is kept of one request and its answer: gathered while bytes pass, told as one line of a capture."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import orjson

from kvaudit.proxy.answers import Answer, ChatAnswer, CompletionAnswer, MessagesAnswer, ResponsesAnswer, error_in
from kvaudit.proxy.parsing import parsed_object, text_of
from kvaudit.proxy.secrets import Secrets
from kvaudit.proxy.streams import BodyDecoder, ServerSentEvents, TooLargeError, UnknownEncodingError
from kvaudit.traces.source import LONGEST_LINE

Outcome = Literal["complete", "failed", "client-gone", "upstream-gone", "cut-short", "unreachable", "stopped"]
"""`failed`: the server said so, by status or body. `cut-short`: a stream that ended without its end mark.
`unreachable`: no answer came. `stopped`: the proxy was."""

Headers = Iterable[tuple[bytes, bytes]]

_KEPT_HEADERS = (b"content-type", b"content-encoding", b"x-request-id", b"request-id")
_LONGEST_ERROR = 4096
_DONE = b"[DONE]"

_APIS: Mapping[str, tuple[str, Callable[[], Answer]]] = {
    "/chat/completions": ("chat", ChatAnswer),
    "/completions": ("completions", CompletionAnswer),
    "/responses": ("responses", ResponsesAnswer),
    "/v1/messages": ("messages", MessagesAnswer),
}


def api_of(method: str, path: str) -> tuple[str, Callable[[], Answer]] | None:
    """The API whose requests are recorded, by the end of the path; None for everything that is only passed on."""
    if method != "POST":
        return None
    return next((api for end, api in _APIS.items() if path.rstrip("/").endswith(end)), None)


class Exchange:
    """One request on its way. `limit` is how many bytes of the request, and of the answer, are kept at most.

    Nothing here raises for what a client or a server sends: what cannot be taken is noted in `problems`.
    `request_unread`, `answer_unread`: the line lacks the parsed request, or a part of the answer.
    """

    def __init__(
        self, api: tuple[str, Callable[[], Answer]], path: str, headers: Headers, query: bytes, limit: int
    ) -> None:
        self.api, make_answer = api
        self.started = time.time()
        self.status: int | None = None
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self.answer = make_answer()
        self.problems: list[str] = []
        self.request_unread = self.answer_unread = False
        self._asked = (headers, query, path)
        self._request_headers = _kept(headers)
        self._answer_headers: dict[str, str] = {}
        self._limit = limit
        self._request: list[bytes] = []
        self._whole: list[bytes] = []
        self._events: ServerSentEvents | None = None
        self._decoder: BodyDecoder | None = None
        self._request_bytes = self._answer_bytes = 0
        self._clock = time.perf_counter()
        self._first_ms: float | None = None
        self._content_ms: float | None = None
        self._total_ms: float | None = None

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self._request)) + sum(map(len, self._whole))

    def elapsed_ms(self) -> float:
        return round((time.perf_counter() - self._clock) * 1000, 3)

    def add_request(self, chunk: bytes) -> None:
        self._request_bytes += len(chunk)
        if self._request_bytes > self._limit:
            self._request.clear()
        else:
            self._request.append(chunk)

    def begin_answer(self, status: int, headers: Headers) -> None:
        self.status = status
        kept = self._answer_headers = _kept(headers)
        try:
            self._decoder = BodyDecoder(kept.get("content-encoding", ""), self._limit)
        except UnknownEncodingError as unknown:
            self._note_answer(f"the answer's encoding {unknown} is not known here")
        if kept.get("content-type", "").startswith("text/event-stream"):
            self._events = ServerSentEvents()

    def add_answer(self, chunk: bytes, now: float) -> None:
        """Takes a chunk that came `now`, in milliseconds since the request (`elapsed_ms`)."""
        if self._first_ms is None:
            self._first_ms = now
        self._answer_bytes += len(chunk)
        if self._decoder is None:
            return
        try:
            for piece in self._decoder.feed(chunk):
                self._take(piece, now)
        except TooLargeError:
            self._stop_taking(f"the answer is larger than {self._limit} bytes")
        except Exception as error:  # of any decoding library: the traffic goes on
            self._stop_taking(f"the answer cannot be read: {error}")

    def end(self, outcome: Outcome, error: str | None = None) -> None:
        """The end of the traffic. `complete` becomes `failed` or `cut-short` where the answer says so."""
        if self.outcome is None:
            self.outcome, self.error, self._total_ms = outcome, error, self.elapsed_ms()

    def line(self, exchange_id: str) -> bytes:
        """The exchange as one line of JSON with its end."""
        secrets = Secrets(*self._asked)
        body, raw = self._told_request(secrets)
        self._close_answer()
        values: dict[str, Any] = {
            "exchange": exchange_id,
            "api": self.api,
            "path": self._asked[2],
            "started": self.started,
            "session": session_of(body),
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "problems": self.problems,
            "streamed": self._events is not None,
            "ttft_ms": self._first_ms if self._events is None else self._content_ms,
            "total_ms": self._total_ms,
            "usage": self.answer.counts(),
            "answer": self.answer.as_json(),
            "request_bytes": self._request_bytes,
            "answer_bytes": self._answer_bytes,
            "request_headers": self._request_headers,
            "answer_headers": self._answer_headers,
        }
        if secrets.replace(values):
            self._note("credentials of the request stood in its path or its answer, and were removed")
        values["error"] = values["error"] and values["error"][:_LONGEST_ERROR]  # only now: a cut key is no longer found
        return self._encoded(values, raw, body) + b"\n"

    def _told_request(self, secrets: Secrets) -> tuple[dict[str, Any] | None, str | dict[str, str] | None]:
        """The request parsed and as it came, both without credentials. What nobody can look into is not kept."""
        raw = b"".join(self._request)
        plain = self._decoded_request(raw)
        if plain is None:
            self.request_unread = True
            return None, None
        text = text_of(plain)
        body, proper = parsed_object(plain)
        if body is None:
            self._note_request("the request is not a JSON object")
            as_bytes = secrets.take_from_damaged(plain.decode(errors="replace"))
            if secrets.take_from_damaged(text) or as_bytes:
                self._note("the bytes of the request are not kept: they may hold credentials")
                return None, None
            return None, _lossless(raw)
        if not proper:
            self._note("the request is no proper JSON (NaN, a lone surrogate or the like), and was read leniently")
        named = secrets.take_from_dropped(text)
        found = secrets.take_from(body) or secrets.are_in(text)
        if found:
            self._note("credentials were removed from the request")
        unsafe = named or (found and secrets.take_from_dropped(text))
        if not found and not unsafe:
            return body, _lossless(raw)
        clean = secrets.removed(text)
        if unsafe or not _says(clean, body):
            self._note("the bytes of the request are not kept: credentials cannot be taken out of them safely")
            return body, None
        return body, clean

    def _decoded_request(self, raw: bytes) -> bytes | None:
        if self._request_bytes > self._limit:
            self._note(f"the request is larger than {self._limit} bytes")
            return None
        try:
            return BodyDecoder(self._request_headers.get("content-encoding", ""), self._limit).whole(raw)
        except Exception as error:  # unknown, damaged or too large
            self._note(f"the request's encoding cannot be undone, and its bytes are not kept: {error!r}")
            return None

    def _encoded(self, values: dict[str, Any], raw: str | dict[str, str] | None, body: dict[str, Any] | None) -> bytes:
        whole = {**values, "request_raw": raw, "request": body}
        line = _dumped(whole)
        if line is None:
            self._note_request("the request is nested too deeply to be told as JSON")
            line = _dumped(whole | {"request": None})
        if line is None or len(line) > LONGEST_LINE:
            self._note_request("request and answer are too large for one line")
            line = orjson.dumps({**values, "answer": None, "request_raw": None, "request": None})
        return line

    def _take(self, piece: bytes, now: float) -> None:
        if self._events is None:
            self._whole.append(piece)
            return
        for data in self._events.feed(piece):
            if self._take_event(data) and self._content_ms is None:
                self._content_ms = now

    def _take_event(self, data: bytes) -> bool:
        if data == _DONE:
            self.answer.finished = True
            return False
        event, _ = parsed_object(data)
        if event is None:
            self._note_answer("an event of the stream is not a JSON object")
            return False
        return self.answer.add_event(event)

    def _close_answer(self) -> None:
        if self._events is not None:
            for data in self._events.finish():
                self._take_event(data)
        elif self._whole:
            self._take_whole(b"".join(self._whole))
        failed = self.status is not None and self.status >= 400
        if self.outcome == "complete" and (failed or self.answer.error):
            self.outcome, self.error = "failed", self.answer.error or self.error or f"status {self.status}"
        elif self.outcome == "complete" and self._events is not None and not self.answer.finished and self._decoder:
            self.outcome, self.error = "cut-short", "the stream ended without its end mark"

    def _take_whole(self, data: bytes) -> None:
        body, _ = parsed_object(data)
        if body is not None:
            self.answer.set_whole(body)
            if self.status is not None and self.status >= 400:
                self.answer.error = error_in(body) or _json_text(body)
        elif self.status is not None and self.status >= 400:
            self.answer.error = data.decode(errors="replace")
        elif self.outcome == "complete":
            self._note_answer("the answer is not a JSON object")

    def _stop_taking(self, problem: str) -> None:
        self._note_answer(problem)
        self._decoder = None
        self._whole.clear()

    def _note_request(self, problem: str) -> None:
        self.request_unread = True
        self._note(problem)

    def _note_answer(self, problem: str) -> None:
        self.answer_unread = True
        self._note(problem)

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def session_of(body: Mapping[str, Any] | None) -> str | None:
    """The session that a request names: its own field, its metadata's, a conversation or a user."""
    if body is None:
        return None
    metadata, conversation = body.get("metadata"), body.get("conversation")
    inner = metadata if isinstance(metadata, dict) else {}
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    candidates = (body.get("session_id"), inner.get("session_id"), named, body.get("user"), inner.get("user_id"))
    return next((name for name in candidates if isinstance(name, str) and name), None)


def _kept(headers: Headers) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in headers
        if name.lower() in _KEPT_HEADERS
    }


def _lossless(raw: bytes) -> str | dict[str, str]:
    """The bytes as a string where it gives them back, else in base64."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}


def _says(text: str, body: dict[str, Any]) -> bool:
    try:
        return parsed_object(text.encode())[0] == body
    except RecursionError:  # of the comparison
        return False


def _json_text(body: Mapping[str, Any]) -> str:
    return (_dumped(body) or b"").decode()


def _dumped(values: Mapping[str, object]) -> bytes | None:
    """None where values are nested deeper than the encoder goes."""
    try:
        return orjson.dumps(values)
    except TypeError:
        return None
