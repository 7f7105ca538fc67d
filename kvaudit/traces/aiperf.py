"""aiperf's inputs.json: `{"data": [{"session_id": ..., "payloads": [...]}]}`, each payload a request as it is sent.

Payloads of a session follow each other; sessions come in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvaudit.records import Trace
from kvaudit.traces.apis import api_of_body, is_embedding
from kvaudit.traces.bodies import RESPONSES
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Log, Record, document_beginning_with
from kvaudit.traces.shapes import as_list, as_object, as_objects
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{\n  "data": [\n    {"session_id": "s", "payloads": [\n      {"model": "m", "max_completion_tokens": 7, '
        '"messages": [{"role": "user", "content": "Hi"}]},\n      {"model": "m", "messages": [{"role": "user", '
        '"content": "And?"}]}\n    ]}\n  ]\n}',
        {"s/1": ["user: Hi"], "s/2": ["user: And?"]},
    ),
)


def read(source: TraceSource) -> Trace:
    """Read an inputs.json. Raises NotThisFormatError, or TraceError with the file."""
    document = as_object(document_beginning_with(source, ("data",)))
    if not any("payloads" in session for session in as_objects(document.get("data"))):
        raise NotThisFormatError("its 'data' has no sessions with 'payloads'")
    return foreign_trace(source, Log("payload", _payloads(document)), _calls)


def _payloads(document: Record) -> Iterator[tuple[int, Record]]:
    place = 0
    for session in as_objects(document.get("data")):
        for number, payload in enumerate(as_list(session.get("payloads")), start=1):
            place += 1
            yield place, {"session": session.get("session_id"), "number": number, "payload": payload}


def _calls(place: int, entry: Record) -> Iterator[Call | LeftOut]:
    body, session = as_object(entry["payload"]), entry["session"]
    api = api_of_body(body)
    if api is None or (api == RESPONSES and is_embedding(body)):
        yield LeftOut(place, "is an embedding request" if api else "asks for no answer of a model")
        return
    yield Call(place, body, api, request_id=_name(session, entry["number"]), session=session, as_sent=True)


def _name(session: Any, number: int) -> str | None:
    return f"{session}/{number}" if type(session) in (str, int) else None
