"""HAR files of browsers and proxies: `log.entries[].request.postData.text`, told by the path of the URL.

Of a request its method, path and body are looked at; headers and cookies are never kept. Entries are sorted by
`startedDateTime`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.apis import api_of_url
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import ENTRY, Log, Record, document_beginning_with
from kvaudit.traces.outcomes import failure_of, other_call
from kvaudit.traces.shapes import as_object, as_objects, parsed
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"log": {"version": "1.2", "entries": [\n  {"startedDateTime": "2024-01-01T00:00:02.000Z", "request": '
        '{"method": "POST", "url": "https://llm.example.org/v1/chat/completions?x=1", "headers": [{"name": '
        '"Authorization", "value": "Bearer secret"}], "postData": {"mimeType": "application/json", "text": '
        '"{\\"model\\": \\"m\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"And?\\"}]}"}}, '
        '"response": {"status": 200, "content": {"text": "{\\"choices\\": []}"}}},\n  {"startedDateTime": '
        '"2024-01-01T00:00:01.000Z", "request": {"method": "POST", "url": "https://llm.example.org/v1/messages", '
        '"postData": {"text": "{\\"max_tokens\\": 5, \\"system\\": \\"Help.\\", \\"messages\\": [{\\"role\\": '
        '\\"user\\", \\"content\\": \\"Hi\\"}]}"}}, "response": {"status": 200}},\n  {"request": {"method": "GET", '
        '"url": "https://llm.example.org/v1/models"}, "response": {"status": 200}}\n]}}',
        {"entry-2": ["system: Help.", "user: Hi"], "entry-1": ["user: And?"]},
    ),
)


def read(source: TraceSource) -> Trace:
    """Read a HAR file. Raises NotThisFormatError, or TraceError with file and line."""
    log = as_object(as_object(document_beginning_with(source, ("log",))).get("log"))
    if type(log.get("entries")) is not list:
        raise NotThisFormatError("its 'log' has no 'entries'")
    entries = enumerate(as_objects(log["entries"]), start=1)
    return foreign_trace(source, Log(ENTRY, entries), _calls, in_order=False)


def _calls(place: int, entry: Record) -> Iterator[Call | LeftOut]:
    request, response = as_object(entry.get("request")), as_object(entry.get("response"))
    api = api_of_url(request.get("url")) if request.get("method") == "POST" else None
    if api is None:
        yield LeftOut(place, other_call(_path(request.get("url"))) or "is no call of a model")
        return
    status, answer = response.get("status"), _answer(as_object(response.get("content")))
    aborted = "failed (no response)" if status == 0 else None
    yield Call(
        place,
        _body(as_object(request.get("postData"))),
        api,
        time=entry.get("startedDateTime"),
        response=answer if type(answer) is dict else None,
        failure=aborted or failure_of(answer, status),
        as_sent=True,
    )


def _path(url: Any) -> str | None:
    return url.partition("?")[0] if type(url) is str else None


def _body(posted: dict[str, Any]) -> dict[str, Any]:
    body = parsed(_text(posted))
    if type(body) is not dict:
        raise TraceError("has no body that is a JSON object")
    return body


def _answer(content: dict[str, Any]) -> Any:
    try:
        return parsed(_text(content))
    except TraceError:
        return None


def _text(content: dict[str, Any]) -> Any:
    text = content.get("text")
    if content.get("encoding") != "base64" or type(text) is not str:
        return text
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise TraceError("has a body that is broken base64") from error
