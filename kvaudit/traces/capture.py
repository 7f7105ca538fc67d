"""Captures of the recording proxy: JSON lines, a header for each time that it was started, then exchanges.

An exchange is `{"exchange": id, "api": "chat" | "completions" | "responses" | "messages", "started": seconds,
"outcome": ..., "request": the parsed body, "answer": {...}, ...}`. Lines stand in the order in which exchanges ended;
the trace is in the order in which they began. Those that failed or were redirected are left out; those that broke off
were served, and stay. Of a damaged file only what is damaged is lost: broken lines are left out and counted, damaged
bytes and a last line that was cut off when the proxy was killed are noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, responses_input
from kvaudit.traces.damaged import Lost, codec_of, readable_lines
from kvaudit.traces.fields import brief
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import LINE, Log, Record
from kvaudit.traces.source import LONGEST_LINE, NotThisFormatError, TraceSource, is_blank
from kvaudit.traces.tally import LeftOut, Tally

VERSION = 1
HEADER = "kvaudit_capture"

EXAMPLES: Examples = (
    (
        '{"kvaudit_capture": 1, "upstream": "http://127.0.0.1:8000", "started": 1}\n'
        '{"exchange": "r1-2", "api": "completions", "started": 3, "outcome": "complete", "status": 200, "request": '
        '{"prompt": "Once"}, "answer": {"choices": [{"text": " upon a time"}]}}\n'
        '{"exchange": "r1-1", "api": "chat", "started": 2, "outcome": "client-gone", "status": 200, "request": '
        '{"messages": [{"role": "user", "content": "Hi"}]}, "answer": {"choices": [{"text": "Hel"}]}}\n'
        '{"exchange": "r1-3", "api": "chat", "started": 4, "outcome": "failed", "status": 503, "request": '
        '{"messages": [{"role": "user", "content": "And?"}]}, "answer": {"choices": []}}\n',
        {"r1-1": ["user: Hi"], "r1-2": ["query: Once"]},
    ),
)

_FAILED = ("failed", "unreachable")
_APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def is_header(line: bytes) -> bool:
    """Whether a line of a file is the header of a capture."""
    if HEADER.encode() not in line:
        return False
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return isinstance(values, dict) and HEADER in values


def read(source: TraceSource) -> Trace:
    """Read a capture. Raises NotThisFormatError, or TraceError with file and line."""
    if not is_header(_first_line(source)):
        raise NotThisFormatError(f"the first line has no {HEADER!r}")
    capture = _Capture(source)
    trace = foreign_trace(source, Log(LINE, capture.exchanges(), capture.tally), capture.calls, in_order=False)
    return replace(trace, header={**trace.header, "upstream": capture.upstream})


def _first_line(source: TraceSource) -> bytes:
    try:
        return next((line for _, line in source.lines() if not is_blank(line)), b"")
    except TraceError as error:
        raise NotThisFormatError(error.message.removeprefix(f"{source.name}, "), error.hint) from error


@dataclass(frozen=True, slots=True)
class _Turn:
    """What later Responses requests may go on from: the conversation up to an answer, and its session."""

    messages: list[Any]
    session: str


@dataclass(slots=True)
class _Capture:
    source: TraceSource
    upstream: str | None = None
    tally: Tally = field(default_factory=lambda: Tally(LINE))
    turns: dict[str, _Turn] = field(default_factory=dict)

    def exchanges(self) -> Iterator[tuple[int, Record]]:
        """(line number, exchange). Lines behind lost ones are counted on from those before them."""
        number = 0
        for line in self._lines():
            if isinstance(line, Lost):
                self._note_lost(line, number)
                continue
            number += 1
            if len(line) > LONGEST_LINE:
                raise self.source.error(number, f"longer than {LONGEST_LINE >> 20} MiB")
            if is_blank(line):
                continue
            try:
                values = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if line.endswith(b"\n"):
                    self.tally.add(LeftOut(number, "broken JSON", error.msg))
                else:
                    self._note_cut(number - 1)
                continue
            if type(values) is dict and HEADER in values:
                self._take_header(number, values)
            elif type(values) is dict and "exchange" in values:
                yield number, values
            else:
                self.tally.add(LeftOut(number, "neither an exchange nor the header of a capture"))

    def _lines(self) -> Iterator[bytes | Lost]:
        try:
            with self.source.path.open("rb") as stream:
                codec = codec_of(stream)
                if codec is not None:
                    yield from readable_lines(stream, codec)
                    return
        except OSError as error:
            raise TraceError(f"{self.source.name} cannot be read: {error.strerror or error}") from error
        yield from (line for _, line in self.source.lines())

    def calls(self, place: int, exchange: Record) -> Iterator[Call]:
        """Raises TraceError, without its place, for an exchange of which nothing can be replayed."""
        api, body = exchange.get("api"), exchange.get("request")
        failed = exchange.get("outcome") in _FAILED or _is_redirect(exchange.get("status"))
        if api not in _APIS:
            raise TraceError(f"is of the API {brief(api)}, which is none of {', '.join(_APIS)}")
        if type(body) is not dict and not failed:
            raise TraceError("has a request that could not be parsed")
        request = body if type(body) is dict else {}
        message = _answer_message(exchange)
        turn = None if failed or api != RESPONSES else self._turn(request)
        before, session = (turn.messages, turn.session) if turn else ([], None)
        session = exchange.get("session") or session
        if api == RESPONSES and not failed:
            session = self._remember(exchange, request, before, message, session)
        yield Call(
            place,
            request,
            api,
            request_id=exchange["exchange"],
            session=session,
            time=exchange.get("started"),
            output_tokens=exchange.get("usage"),
            response=message and {"choices": [{"message": message}]},
            failure=_failure(exchange) if failed else None,
            before=before,
            as_sent=True,
        )

    def _note_lost(self, lost: Lost, whole: int) -> None:
        if lost.cut:
            self._note_cut(whole)
        else:
            self.tally.notes.append(
                f"{lost.end - lost.start:,} bytes of the capture behind line {whole}, from byte {lost.start:,} on, are "
                "damaged: what stood there is lost"
            )

    def _note_cut(self, whole: int) -> None:
        self.tally.notes.append(f"the capture was cut off behind line {whole}, when the proxy was stopped")

    def _take_header(self, line: int, values: Record) -> None:
        if values[HEADER] != VERSION:
            raise self.source.error(
                line, f"a capture of version {brief(values[HEADER])}", "read it with the kvaudit that recorded it"
            )
        self.upstream = self.upstream or values.get("upstream")

    def _turn(self, body: Record) -> _Turn | None:
        for name, what in (("conversation", "conversation"), ("prompt", "prompt")):
            if body.get(name):
                raise TraceError(f"has a {what} that the server keeps, and the capture does not")
        previous = body.get("previous_response_id")
        if previous is None:
            return None
        if type(previous) is not str or previous not in self.turns:
            raise TraceError("goes on from a response that the capture does not hold before it")
        return self.turns[previous]

    def _remember(self, exchange: Record, body: Record, before: list[Any], message: Record | None, session: Any) -> Any:
        """The session: where none is named, the response that began it."""
        answer = exchange.get("answer")
        name = answer.get("id") if type(answer) is dict else None
        if type(name) is not str or not name or message is None:
            return session
        told = session if type(session) is str and session else name
        self.turns[name] = _Turn([*before, *responses_input(body), message], told)
        return told


def _answer_message(exchange: Record) -> Record | None:
    """The first answer as a chat message."""
    answer = exchange.get("answer")
    choices = answer.get("choices") if type(answer) is dict else None
    if type(choices) is not list or not choices or type(choices[0]) is not dict:
        return None
    message = {"role": "assistant", "content": choices[0].get("text")}
    return message | ({"tool_calls": calls} if (calls := choices[0].get("tool_calls")) else {})


def _is_redirect(status: Any) -> bool:
    return type(status) is int and 300 <= status < 400


def _failure(exchange: Record) -> str:
    status = exchange.get("status")
    if exchange.get("outcome") == "unreachable":
        return "failed (the server was not reached)"
    if _is_redirect(status):
        return f"was redirected (status {status})"
    return f"failed (status {status})" if type(status) is int and status >= 400 else "failed (an error in the answer)"
