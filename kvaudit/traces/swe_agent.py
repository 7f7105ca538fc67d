"""Trajectories of SWE-agent (.traj: `history`) and mini-swe-agent (`messages`, `info`): one JSON document a run.

Each step of the assistant was a request: the messages up to it, of the same agent where several took turns. Requests
are named INSTANCE/STEP, and the session is the instance, or the name of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from kvaudit.records import Trace
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Log, Record, document_beginning_with
from kvaudit.traces.shapes import as_list, as_object, first_of
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{\n  "trajectory": [],\n  "history": [\n    {"role": "system", "content": "Help.", "agent": "main"},\n'
        '    {"role": "user", "content": "Mend it.", "agent": "main"},\n    {"role": "assistant", "content": '
        '"I look.", "thought": "I look.", "action": "ls", "agent": "main", "tool_calls": [{"id": "c", "function": '
        '{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}}]},\n    {"role": "tool", "content": "a.py", '
        '"agent": "main", "tool_call_ids": ["c"]},\n    {"role": "assistant", "content": "Done.", "agent": "main"}\n'
        '  ],\n  "info": {"instance_id": "i"}\n}',
        {
            "i/1": ["system: Help.", "user: Mend it."],
            "i/2": [
                "system: Help.",
                "user: Mend it.",
                'assistant: I look.\n{"name":"bash","arguments":{"command": "ls"}}',
                "tool: a.py",
            ],
        },
    ),
    (
        '{"info": {"config": {}, "exit_status": "Submitted"}, "instance_id": "m", "messages": [{"role": "system", '
        '"content": "Help."}, {"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "ls", "extra": '
        '{"response": {"usage": {"completion_tokens": 4}}, "timestamp": 1700000000.5}}, {"role": "exit", "content": '
        '""}], "trajectory_format": "mini-swe-agent-1.1"}',
        {"m/1": ["system: Help.", "user: Mend it."]},
    ),
)

_FIRST_KEYS = ("trajectory", "history", "info", "environment", "replay_config", "messages", "instance_id")
_NO_MESSAGES = ("exit",)
"""Roles of entries that were never sent to the model."""


def read(source: TraceSource) -> Trace:
    """Read a trajectory. Raises NotThisFormatError, or TraceError with the file."""
    run = as_object(document_beginning_with(source, (*_FIRST_KEYS, "trajectory_format")))
    if type(run.get("history")) is list and run.keys() & {"trajectory", "info"}:
        messages = run["history"]
    elif type(run.get("messages")) is list and ("trajectory_format" in run or type(run.get("info")) is dict):
        messages = run["messages"]
    else:
        raise NotThisFormatError("it has neither a 'history' nor 'messages' with 'info'")
    instance = first_of(run, "instance_id") or as_object(run.get("info")).get("instance_id")
    name = instance if type(instance) is str and instance else PurePath(source.name).name.partition(".")[0] or "run"
    return foreign_trace(source, Log("message", _steps(messages, name)), _calls)


def _steps(messages: list[Any], name: str) -> Iterator[tuple[int, Record]]:
    step = 0
    for place, message in enumerate(messages, start=1):
        if as_object(message).get("role") == "assistant" and not message.get("is_demo"):
            step += 1
            agent = message.get("agent")
            before = [
                earlier
                for earlier in messages[: place - 1]
                if as_object(earlier).get("role") not in _NO_MESSAGES and as_object(earlier).get("agent") == agent
            ]
            yield place, {"id": f"{name}/{step}", "session": name, "before": before, "answer": message}


def _calls(place: int, step: Record) -> Iterator[Call | LeftOut]:
    extra = as_object(step["answer"].get("extra"))
    yield Call(
        place,
        {"messages": as_list(step["before"])},
        request_id=step["id"],
        session=step["session"],
        time=extra.get("timestamp"),
        output_tokens=as_object(extra.get("response")).get("usage"),
    )
