"""LMCache's agentic traces: a turn a line, with the whole conversation up to it in `input`.

`session_id` is the session and `output_length` the length of the answer. `pre_gap` says how long a session paused
before the turn, which is no time of day, so turns stay in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.records import Trace
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.source import NotThisFormatError, TraceSource

EXAMPLES: Examples = (
    (
        '{"session_id": "s", "model": "m", "input": [{"role": "user", "content": "Hi"}], "output_length": 7, '
        '"pre_gap": 0.0}\n'
        '{"session_id": "s", "model": "m", "input": [{"role": "user", "content": "Hi"}, {"role": "assistant", '
        '"content": "Hello."}, {"role": "user", "content": "And?"}], "output_length": 9, "pre_gap": 1.5}',
        {"line-1": ["user: Hi"], "line-2": ["user: Hi", "assistant: Hello.", "user: And?"]},
    ),
)


def read(source: TraceSource) -> Trace:
    """Read an agentic trace. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if type(first.get("input")) is not list or not first.keys() & {"output_length", "pre_gap"}:
        raise NotThisFormatError("the first line has no 'input' with 'output_length' or 'pre_gap'")
    return foreign_trace(source, read_log(source), _calls)


def _calls(place: int, turn: Record) -> Iterator[Call]:
    body = {"messages": turn.get("input"), "tools": turn.get("tools"), "max_tokens": turn.get("max_tokens")}
    yield Call(place, body, session=turn.get("session_id"), output_tokens=turn.get("output_length"))
