"""OpenAI Batch files: requests (`custom_id`, `method`, `url`, `body`), with the lines of a results file among them.

A results file alone holds answers and no prompts. Beside its input it says which requests failed.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.apis import api_of_body, api_of_url, is_embedding
from kvaudit.traces.bodies import RESPONSES
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import failure_of, other_call
from kvaudit.traces.results import ResultsOnlyError
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "max_tokens": 5, '
        '"messages": [{"role": "user", "content": "Hi"}]}}\n'
        '{"custom_id": "b", "method": "POST", "url": "/v1/responses", "body": {"model": "m", "input": "And?"}}\n'
        '{"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", '
        '"messages": [{"role": "user", "content": "Lost"}]}}\n'
        '{"id": "batch_req_1", "custom_id": "c", "response": {"status_code": 500, "body": {}}, "error": null}',
        {"a": ["user: Hi"], "b": ["user: And?"]},
    ),
)


def read(source: TraceSource) -> Trace:
    """Read a batch. Raises NotThisFormatError, ResultsOnlyError, or TraceError with file and line."""
    first = first_record(source)
    if not (_is_request(first) or _is_result(first)):
        raise NotThisFormatError("the first line has no 'body' and is no result of a batch")
    results = {str(line["custom_id"]): line for _, line in read_log(source).records if _is_result(line)}
    if not any(_is_request(line) for _, line in read_log(source).records):
        failures = {name: failure for name, line in results.items() if (failure := _failure(line))}
        raise ResultsOnlyError(source.name, failures)

    def calls(place: int, line: Record) -> Iterator[Call | LeftOut]:
        if not _is_result(line):
            name = line.get("custom_id")
            yield _call(place, line, results.get(str(name)) if type(name) in (str, int) else None)

    return foreign_trace(source, read_log(source), calls)


def _is_request(line: Record) -> bool:
    return type(line.get("body")) is dict and "messages" not in line


def _is_result(line: Record) -> bool:
    return type(line.get("custom_id")) in (str, int) and "response" in line and "body" not in line


def _call(place: int, line: Record, result: Record | None) -> Call | LeftOut:
    body, url = line.get("body"), line.get("url")
    if type(body) is not dict:
        raise TraceError("has no 'body'")
    if other := other_call(url):
        return LeftOut(place, other)
    api = api_of_url(url) or api_of_body(body)
    if api is None or (api == RESPONSES and is_embedding(body)):
        return LeftOut(place, "is an embedding request" if api else "asks for no answer of a model")
    answer = result.get("response") if result else None
    return Call(
        place,
        body,
        api,
        request_id=line.get("custom_id"),
        response=answer.get("body") if type(answer) is dict else None,
        failure=_failure(result) if result else None,
        as_sent=True,
    )


def _failure(result: Record) -> str | None:
    answer = result.get("response")
    inner = answer.get("body") if type(answer) is dict else None
    return failure_of(answer, None, result.get("error")) or failure_of(inner)
