"""OpenAI Responses requests as JSON lines: `input` (a string or items), `instructions`, `tools`.

A request that goes on from `previous_response_id` is given the conversation up to there where the file holds that
response: as `response`, or as `id` and `output` of the line itself. Where it does not, the request is left out. A
chain is a session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.apis import LOG_FIELDS, is_embedding
from kvaudit.traces.bodies import RESPONSES, responses_input, responses_items
from kvaudit.traces.foreign import Call, Examples, LeftOut, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import logged_failure
from kvaudit.traces.source import NotThisFormatError, TraceSource

EXAMPLES: Examples = (
    (
        '{"model": "m", "instructions": "Help.", "input": "Hi", "response": {"id": "resp_1", "output": [{"type": '
        '"message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}]}}\n'
        '{"model": "m", "instructions": "Help.", "previous_response_id": "resp_1", "input": [{"type": "message", '
        '"role": "user", "content": [{"type": "input_text", "text": "Read it."}]}, {"type": "function_call", '
        '"call_id": "c", "name": "read", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", '
        '"output": "three lines"}]}\n'
        '{"model": "m", "previous_response_id": "resp_9", "input": "Lost"}',
        {
            "line-1": ["system: Help.", "user: Hi"],
            "line-2": [
                "system: Help.",
                "user: Hi",
                "assistant: Hello.",
                "user: Read it.",
                'assistant: {"name":"read","arguments":{}}',
                "tool: three lines",
            ],
        },
    ),
)


def read(source: TraceSource) -> Trace:
    """Read Responses requests. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if type(first.get("input")) not in (str, list) or first.keys() & {*LOG_FIELDS, *_OTHER_FIELDS}:
        raise NotThisFormatError("the first line has no 'input' of the Responses API")
    return foreign_trace(source, read_log(source), _Chains().calls)


_OTHER_FIELDS = ("output_length", "pre_gap", "type", "traceId", "trace_id", "messages", "body")


@dataclass(frozen=True, slots=True)
class _Turn:
    messages: list[Any]
    session: str


@dataclass(slots=True)
class _Chains:
    """Conversations up to each response of the file, by its id."""

    turns: dict[str, _Turn] = field(default_factory=dict)

    def calls(self, place: int, record: Record) -> Iterator[Call | LeftOut]:
        if is_embedding(record):
            yield LeftOut(place, "is an embedding request")
            return
        for name, what in (("conversation", "conversation"), ("prompt", "prompt")):
            if record.get(name):
                raise TraceError(f"has a {what} that the server keeps, and the file does not")
        turn = self._turn(record.get("previous_response_id"))
        before, session = (turn.messages, turn.session) if turn else ([], None)
        response = self._remember(record, before, session)
        yield Call(
            place,
            record,
            RESPONSES,
            request_id=record.get("request_id") or record.get("custom_id") or record.get("id"),
            session=record.get("session") or record.get("session_id") or session or response,
            time=record.get("timestamp") or record.get("created_at"),
            response=record.get("response") or ({"output": record["output"]} if "output" in record else None),
            failure=logged_failure(record),
            before=before,
        )

    def _turn(self, previous: Any) -> _Turn | None:
        if previous is None:
            return None
        if type(previous) is not str or previous not in self.turns:
            raise TraceError("goes on from a response that the file does not hold before it")
        return self.turns[previous]

    def _remember(self, record: Record, before: list[Any], session: str | None) -> str | None:
        """The id of the response that others may go on from."""
        kept = record.get("response")
        response = kept if type(kept) is dict else record
        name, output = response.get("id"), response.get("output")
        if type(name) is not str or not name or type(output) is not list:
            return None
        messages = [*before, *responses_input(record), *responses_items(output)]
        self.turns[name] = _Turn(messages, session or name)
        return name
