"""LangSmith exports: runs as JSON lines, a JSON array or Parquet, whose `inputs` may be JSON text.

Runs of the type `llm` are calls of a model. `inputs.messages` is one list of messages or a list of one such list, as
LangChain or as OpenAI writes them; `inputs.prompts` is a list of one plain prompt. Tools and limits stand in
`extra.invocation_params`. The session is the thread of `extra.metadata`, else the trace. Runs are sorted by start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.bodies import CHAT, COMPLETIONS
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.langchain import chat_message
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import failure_of
from kvaudit.traces.shapes import as_list, as_object, first_of, parsed
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"id": "b", "run_type": "llm", "trace_id": "t", "start_time": "2024-01-01T00:00:02", "dotted_order": "2", '
        '"inputs": {"messages": [[{"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", '
        '"SystemMessage"], "kwargs": {"content": "Help."}}, {"lc": 1, "type": "constructor", "id": ["langchain", '
        '"schema", "messages", "AIMessage"], "kwargs": {"content": "", "tool_calls": [{"id": "c", "name": "read", '
        '"args": {"path": 1}, "type": "tool_call"}]}}, {"type": "tool", "content": "three lines"}]]}, '
        '"extra": {"invocation_params": {"tools": [{"name": "read"}], "max_tokens": 9}}, "outputs": null}\n'
        '{"id": "x", "run_type": "chain", "trace_id": "t", "start_time": "2024-01-01T00:00:00", "inputs": {}}\n'
        '{"id": "a", "run_type": "llm", "trace_id": "t", "start_time": "2024-01-01T00:00:01", "inputs": '
        '"{\\"prompts\\": [\\"Once upon\\"]}"}',
        {
            "a": ["query: Once upon"],
            "b": [
                "system: Help.",
                'system: [{"name":"read"}]',
                'assistant: {"name":"read","arguments":{"path":1}}',
                "tool: three lines",
            ],
        },
    ),
)

_THREADS = ("session_id", "thread_id", "conversation_id")
_SETTINGS = ("tools", "functions", "max_tokens", "max_completion_tokens", "stop")


def read(source: TraceSource) -> Trace:
    """Read an export. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if not {"run_type", "inputs"} <= first.keys():
        raise NotThisFormatError("the first row is no run of LangSmith")
    return foreign_trace(source, read_log(source), _calls, in_order=False)


def _calls(place: int, run: Record) -> Iterator[Call | LeftOut]:
    kind = run.get("run_type")
    if kind != "llm":
        yield LeftOut(place, "is an embedding request" if kind == "embedding" else "is no call of a model")
        return
    extra, outputs = as_object(parsed(run.get("extra"))), parsed(run.get("outputs"))
    inputs = as_object(parsed(run.get("inputs")))
    body = _body(inputs) | _settings(extra)
    yield Call(
        place,
        body,
        COMPLETIONS if "prompt" in body else CHAT,
        request_id=_text(run.get("id")) or None,
        session=first_of(as_object(extra.get("metadata")), *_THREADS) or _text(run.get("trace_id")) or None,
        time=run.get("start_time"),
        output_tokens=run.get("completion_tokens") or _usage(outputs),
        response=None if outputs is None or "choices" not in as_object(outputs) else outputs,
        failure=failure_of(None, None, run.get("error")) or failure_of({"status": run.get("status")}),
    )


def _body(inputs: dict[str, Any]) -> dict[str, Any]:
    messages = as_list(inputs.get("messages"))
    if messages and all(type(batch) is list for batch in messages):
        messages = _only(messages, "lists of messages")
    if messages:
        return {**inputs, "messages": [chat_message(message) for message in messages]}
    prompts = as_list(inputs.get("prompts")) or [inputs[name] for name in ("prompt",) if inputs.get(name)]
    if not prompts:
        raise TraceError("has no prompt: neither 'messages' nor 'prompts'")
    return {"prompt": _only(prompts, "prompts")}


def _only(values: list[Any], what: str) -> Any:
    if len(values) != 1:
        raise TraceError(f"has several {what} in one run")
    return values[0]


def _settings(extra: dict[str, Any]) -> dict[str, Any]:
    parameters = as_object(extra.get("invocation_params"))
    return {name: parameters[name] for name in _SETTINGS if parameters.get(name) is not None}


def _usage(outputs: Any) -> Any:
    return first_of(as_object(as_object(outputs).get("llm_output")), "token_usage", "usage")


def _text(value: Any) -> Any:
    """Ids in columns of Parquet may be UUIDs, as such or as their bytes."""
    return value.hex() if type(value) is bytes else str(value) if isinstance(value, UUID) else value
