"""Requests with their answers as JSON lines: `{"request": {...}, "response": {...}}`, as gateways and clients log them.

`request` is a body as the APIs take it (chat completions, completions, Responses or Anthropic Messages), `response` the
answer. Either may be JSON text, or hold the `body` among others. Beside them `id`, `request_id` or `custom_id`,
`session` or `session_id`, `timestamp`, `created`, `created_at`, `time` or `start_time`, `url`, `status` and `error` are
taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvaudit.records import Trace
from kvaudit.traces.apis import LOG_FIELDS, api_of_body, api_of_url
from kvaudit.traces.bodies import RESPONSES
from kvaudit.traces.chains import Chains
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import failure_of, logged_failure, other_call
from kvaudit.traces.shapes import as_object, first_of, parsed
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"id": "a", "request": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}, "response": '
        '{"choices": [{"message": {"role": "assistant", "content": "Hello."}}], "usage": {"completion_tokens": 2}}}\n'
        '{"request": {"model": "claude-x", "max_tokens": 5, "system": "Help.", "messages": [{"role": "user", '
        '"content": "And?"}]}, "response": {"type": "message", "content": [{"type": "text", "text": "Then."}]}}\n'
        '{"request": {"model": "m", "messages": [{"role": "user", "content": "Lost"}]}, "response": {"error": '
        '{"type": "overloaded"}}}',
        {"a": ["user: Hi"], "line-2": ["system: Help.", "user: And?"]},
    ),
    (
        '{"timestamp": 1700000000, "request": {"url": "/v1/completions", "body": {"prompt": "Once"}}, "response": '
        '{"status_code": 200, "body": {"choices": [{"text": " upon"}]}}}\n'
        '{"timestamp": 1700000001, "request": "{\\"input\\": \\"Hi\\"}", "response": "{\\"output\\": []}"}',
        {"line-1": ["query: Once"], "line-2": ["user: Hi"]},
    ),
)

_TIMES = ("timestamp", "created", "created_at", "time", "start_time")
_URLS = ("url", "path", "endpoint")


def read(source: TraceSource) -> Trace:
    """Read logged pairs. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    request = parsed(first.get("request"))
    if type(request) is not dict or "exchange" in first or first.keys() & LOG_FIELDS:
        raise NotThisFormatError("the first line has no 'request' that is the body of one")
    if "response" not in first and api_of_body(_body(request)) is None:
        raise NotThisFormatError("the first line has neither a 'request' of a known API nor its 'response'")
    return foreign_trace(source, read_log(source), _Pairs().calls)


class _Pairs:
    def __init__(self) -> None:
        self._chains = Chains()

    def calls(self, place: int, pair: Record) -> Iterator[Call | LeftOut]:
        request, response = as_object(parsed(pair.get("request"))), parsed(pair.get("response"))
        url = first_of(request, *_URLS) or first_of(pair, *_URLS)
        body, answer = _body(request), _body(response) if type(response) is dict else response
        api = api_of_url(url) or api_of_body(body)
        if (other := other_call(url)) or api is None:
            yield LeftOut(place, other or "asks for no answer of a model")
            return
        call = Call(
            place,
            body,
            api,
            request_id=first_of(pair, "id", "request_id", "custom_id"),
            session=first_of(pair, "session", "session_id"),
            time=first_of(pair, *_TIMES),
            response=answer,
            failure=logged_failure({**pair, "response": response}) or failure_of(answer),
        )
        yield self._chains.continued(call) if api == RESPONSES else call


def _body(value: dict[str, Any]) -> dict[str, Any]:
    """The body of what may hold more than it."""
    inner = parsed(value.get("body"))
    return inner if type(inner) is dict else value
