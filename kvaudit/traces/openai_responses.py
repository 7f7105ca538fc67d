"""OpenAI Responses requests as JSON lines: `input` (a string or items), `instructions`, `tools`.

A request that goes on from `previous_response_id` is given the conversation up to there where the file holds that
response: as `response`, or as `id` and `output` of the line itself. Where it does not, the request is left out. A
chain is a session.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.records import Trace
from kvaudit.traces.apis import LOG_FIELDS
from kvaudit.traces.bodies import RESPONSES
from kvaudit.traces.chains import Chains
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import logged_failure
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

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

_OTHER_FIELDS = ("output_length", "pre_gap", "type", "traceId", "trace_id", "messages", "body")


def read(source: TraceSource) -> Trace:
    """Read Responses requests. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if type(first.get("input")) not in (str, list) or first.keys() & {*LOG_FIELDS, *_OTHER_FIELDS}:
        raise NotThisFormatError("the first line has no 'input' of the Responses API")
    chains = Chains()

    def calls(place: int, record: Record) -> Iterator[Call | LeftOut]:
        yield chains.continued(_call(place, record))

    return foreign_trace(source, read_log(source), calls)


def _call(place: int, record: Record) -> Call:
    answer = record.get("response") or (
        {"id": record.get("id"), "output": record["output"]} if "output" in record else None
    )
    return Call(
        place,
        record,
        RESPONSES,
        request_id=record.get("request_id") or record.get("custom_id") or record.get("id"),
        session=record.get("session") or record.get("session_id"),
        time=record.get("timestamp") or record.get("created_at"),
        response=answer,
        failure=logged_failure(record),
    )
