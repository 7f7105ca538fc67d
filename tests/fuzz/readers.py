"""Coverage-guided fuzzing of what takes the bytes of others: trace readers, the recording proxy and redaction.

    pip install -e '.[test,fuzz]'
    python tests/fuzz/readers.py traces [FOLDER] [-max_total_time=300] [options of libFuzzer]
    python tests/fuzz/readers.py traces crash-0123...

The first argument is the target: `traces`, `proxy` or `redaction`. FOLDER keeps the corpus from one run to the next;
without it, it is a temporary one. The examples that the formats carry are the first inputs. An input is a few bytes
that say how the rest is taken (the format that is named, how the file is packed), and the rest. libFuzzer ends at the
first input that breaks a property and writes it to a file; named in the place of FOLDER, that file is run again.

What must hold. Traces: reading ends in requests that can be written, and read again as the same, or in one line that
names the file. Proxy: nothing is raised, each exchange becomes a line of JSON that the reader of captures takes, and
how a stream is cut into chunks changes nothing of it. Redaction: nothing that is found remains, and a second time
changes nothing. All: within ten seconds and two gigabytes for an input.
"""

from __future__ import annotations

import gzip
import io
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import atheris  # type: ignore
import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports(include=["kvaudit"]):
    from foreign_examples import EXAMPLES

    import kvaudit.proxy.answers
    import kvaudit.proxy.exchange
    import kvaudit.redaction.addresses
    import kvaudit.redaction.builtin
    import kvaudit.redaction.keys
    import kvaudit.redaction.personal
    import kvaudit.redaction.redactor
    import kvaudit.traces.importing
    import kvaudit.traces.streaming
    import kvaudit.traces.writer

from json_mutations import JsonMutator, field_names, parsed_lines
from packings import PACKINGS, zstd

from kvaudit.errors import KvauditError
from kvaudit.plugins import BUILT_IN
from kvaudit.proxy.exchange import Exchange, api_of
from kvaudit.records import Request
from kvaudit.redaction.redactor import Redactor
from kvaudit.traces import read_trace
from kvaudit.traces.hash_only import MOONCAKE, WEKA, HashesOnlyError
from kvaudit.traces.importing import import_files
from kvaudit.traces.segments import make_segment
from kvaudit.traces.streaming import open_trace
from kvaudit.traces.writer import TraceWriter

Take = Callable[[bytes, bytes], None]

LIMITS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=16384", "-len_control=0")
JSON_MUTATIONS = 0.7
"""The share of mutations that keep JSON whole; the others are libFuzzer's own."""

LONGEST_ANSWER = 1 << 20
FORMATS = (None, *BUILT_IN["traces"])
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ENCODINGS = (b"", b"gzip", b"zstd", b"deflate")


@dataclass(frozen=True, slots=True)
class Target:
    """`take` gets the first `choices` bytes of an input and the rest, which `seeds` begin with."""

    take: Take
    choices: int
    seeds: Callable[[], Iterator[bytes]]


@cache
def folder() -> Path:
    """Where inputs are written to be read. It outlives the process, which libFuzzer ends where it stands."""
    return Path(tempfile.mkdtemp(prefix="kvaudit-fuzz-"))


def take_trace(choices: bytes, content: bytes) -> None:
    name, packing = FORMATS[choices[0] % len(FORMATS)], PACKINGS[choices[1] % len(PACKINGS)]
    path = folder() / "trace"
    path.write_bytes(packing(content))
    try:
        if choices[2] % 4:
            trace = read_trace(path, name)
            requests: Sequence[Request] = trace.requests
            header = dict(trace.header)
        else:
            imported = import_files([path], name, keep_parts=choices[2] % 8 == 0)
            requests, header = imported.requests, imported.header()
    except HashesOnlyError:
        take_hashes(path, name)
    except KvauditError as error:
        require_one_line(error, path)
    else:
        require_the_same_again(requests, header)


def take_hashes(path: Path, name: str | None) -> None:
    try:
        with open_trace(path, name) as trace:
            for _ in trace.requests:
                pass
    except KvauditError as error:
        require_one_line(error, path)


def require_one_line(error: KvauditError, path: Path) -> None:
    assert str(path) in error.message, f"no file is named: {error}"
    assert "\n" not in str(error), f"more than one line: {error}"


def require_the_same_again(requests: Sequence[Request], header: dict[str, object]) -> None:
    assert requests, "neither requests nor an error"
    path = folder() / "written"
    with io.BytesIO() as stream:
        writer = TraceWriter(stream, header)
        for request in requests:
            writer.add(request)
        path.write_bytes(stream.getvalue())
    again = read_trace(path)
    assert again.digest == writer.written().digest, "what was written is read as something else"
    assert [request.segments for request in again.requests] == [request.segments for request in requests]


def take_exchange(choices: bytes, content: bytes) -> None:
    """The content is a request's body, and behind the end of its line the answer's."""
    path, streamed = STREAMED[choices[0] % len(STREAMED)], bool(choices[0] & 4)
    encoding = ENCODINGS[choices[1] % len(ENCODINGS)]
    request, _, answer = content.partition(b"\n")
    told = [
        exchange_told(path, request, answer, encoding, streamed, step) for step in (len(answer) or 1, choices[2] + 1)
    ]
    if b"cannot be read" not in told[0]:  # of damaged data, how much is read before the damage is seen is the library's
        assert told[0] == told[1], "chunks change what is told of an answer"
    capture = folder() / "capture"
    capture.write_bytes(b'{"kvaudit_capture": 1}\n' + told[0])
    try:
        requests = read_trace(capture, "capture").requests
    except KvauditError as error:
        require_one_line(error, capture)
    else:
        require_the_same_again(requests, {})


def exchange_told(path: str, request: bytes, answer: bytes, encoding: bytes, streamed: bool, step: int) -> bytes:
    """The line of a capture, without its times."""
    api = api_of("POST", path)
    assert api is not None
    exchange = Exchange(api, path, [(b"authorization", b"Bearer sk-of-the-fuzzer")], b"", LONGEST_ANSWER)
    exchange.started = 1.0
    exchange.add_request(request)
    kind = b"text/event-stream" if streamed else b"application/json"
    exchange.begin_answer(200, [(b"content-type", kind), (b"content-encoding", encoding)])
    for start in range(0, len(answer), step):
        exchange.add_answer(answer[start : start + step], 1.0)
    exchange.end("complete")
    line = exchange.line("r1-1")
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    told = orjson.loads(line)
    del told["total_ms"], told["ttft_ms"]
    return orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)


@cache
def redactor() -> Redactor:
    built_in = kvaudit.redaction.builtin
    return Redactor(built_in.built_in(tuple(built_in.SUMMARIES), folder() / "rules"), b"a salt of the fuzzer")


def take_text(choices: bytes, content: bytes) -> None:
    text = content.decode(errors="replace")
    once = redactor().redact(text)
    assert not redactor().find(once.text), "something that is found remains"
    assert redactor().redact(once.text) == (once.text, ()), "a second time changes more"
    assert bool(once.replaced) == (once.text != text)
    make_segment("document", once.text or "x")


def trace_seeds() -> Iterator[bytes]:
    """The examples of the formats, each with its format named and not, and packed in every way."""
    names = list(BUILT_IN["traces"])
    texts = [(name, text) for name, text, _ in EXAMPLES] + [
        ("mooncake", MOONCAKE),
        ("weka", WEKA),
        ("kvaudit", native()),
    ]
    for at, (name, text) in enumerate(texts):
        yield bytes([0, 0, at]) + text.encode()
        yield bytes([names.index(name) + 1, at % len(PACKINGS), at]) + text.encode()
        if name in ("capture", "langfuse", "langsmith"):
            yield from (bytes([0, packing, at]) + text.encode() for packing in range(len(PACKINGS)))
            yield from (bytes([0, 0, at]) + packed(text.encode()) for packed in PACKINGS)


def native() -> str:
    """A trace that holds everything a line may have."""
    segment = make_segment("document", "a document\n", None, (1, 2))
    query = {"kind": "query", "text": "which?", "role": "user"}
    request = {"segments": [segment.content_id, query], "prelude": [[segment.content_id]], "session": "s", "chat": True}
    optional = {"max_tokens": 5, "stop": ["\n"], "expected": "this", "timestamp": 1.5}
    lines: list[dict[str, object]] = [
        {"kvaudit_trace": 1, "made_by": "the fuzzer"},
        {"segment": segment.content_id, "kind": "document", "text": segment.text, "token_ids": [1, 2]},
        {"request": "r1", **request, **optional},
        {"request": "r2", "segments": [query]},
    ]
    return "\n".join(orjson.dumps(line).decode() for line in lines)


REQUEST = (
    b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "api_key": "sk-of-the-fuzzer", "user": "u"}'
)
ANSWERS = (
    b'data: {"id": "a", "model": "m", "choices": [{"index": 0, "delta": {"content": "He", "tool_calls": [{"index": 0, '
    b'"id": "c", "function": {"name": "f", "arguments": "{}"}}]}, "finish_reason": "stop"}]}\n\n: note\n\ndata: '
    b'{"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}}\r\n\r\ndata: '
    b"[DONE]",
    b'data: {"choices": [{"index": 0, "text": "He", "finish_reason": null}]}\n\ndata: {"error": {"message": "no"}}\n\n',
    b'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": "He"}\n\ndata: {"type": '
    b'"response.output_item.added", "output_index": 1, "item": {"type": "function_call", "call_id": "c", "name": "f"}}'
    b'\n\ndata: {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{}"}\n\ndata: {"type": '
    b'"response.completed", "response": {"id": "r", "status": "completed", "output": [{"type": "message", "content": '
    b'[{"text": "He"}]}, {"type": "reasoning", "summary": [{"text": "Hm"}]}], "usage": {"input_tokens": 3}}}\n\n',
    b'data: {"type": "message_start", "message": {"id": "m", "usage": {"input_tokens": 3, "cache_read_input_tokens": '
    b'2}}}\n\ndata: {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", '
    b'"name": "f", "input": {}}}\n\ndata: {"type": "content_block_delta", "index": 0, "delta": {"partial_json": "{}"}}'
    b'\n\ndata: {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}\n\n'
    b'data: {"type": "message_stop"}\n\n',
)


def exchange_seeds() -> Iterator[bytes]:
    for at, answer in enumerate(ANSWERS):
        yield bytes([at | 4, 0, 7]) + REQUEST + b"\n" + answer
        whole = answer.partition(b"data: ")[2].partition(b"\n")[0]
        yield bytes([at, 0, 7]) + REQUEST + b"\n" + whole
        yield bytes([at, 1, 7]) + REQUEST + b"\n" + gzip.compress(whole)
        yield bytes([at, 2, 7]) + REQUEST + b"\n" + zstd(whole)
        yield bytes([at | 4, 3, 7]) + REQUEST + b"\n" + zlib.compress(answer)


def text_seeds() -> Iterator[bytes]:
    from redaction.sensitive_values import NAMED, VALUES

    yield from (f"It is {value}, so.".encode() for _, value in VALUES)
    yield from (text.format(value).encode() for text, value in NAMED.values())


TARGETS = {
    "traces": Target(take_trace, 3, trace_seeds),
    "proxy": Target(take_exchange, 3, exchange_seeds),
    "redaction": Target(take_text, 0, text_seeds),
}


def dictionary(names: set[str]) -> str:
    """Field names as libFuzzer's dictionaries have them: a quoted string a line, escapes as bytes."""
    quoted = (orjson.dumps(name) for name in sorted(names))
    return "".join('"' + "".join(f"\\x{byte:02x}" for byte in name) + '"\n' for name in quoted)


def main(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] not in TARGETS:
        sys.exit(f"the first argument is one of {', '.join(TARGETS)}")
    target, given = TARGETS[arguments[0]], list(arguments[1:])
    seeds = list(target.seeds())
    donors = [value for seed in seeds for value in parsed_lines(seed[target.choices :])]
    mutator = JsonMutator(donors)

    def take(data: bytes) -> None:
        if len(data) > target.choices:
            target.take(data[: target.choices], data[target.choices :])

    def mutate(data: bytes, longest: int, seed: int) -> bytes:
        random = Random(seed)
        head, content = data[: target.choices], data[target.choices :]
        if random.random() < JSON_MUTATIONS:
            mutated = head + mutator.mutated(content, random)
            if mutated != data and len(mutated) <= longest:
                return mutated
        return bytes(atheris.Mutate(data, longest))

    atheris.Setup([sys.argv[0], *prepared(given, seeds, donors)], take, custom_mutator=mutate)
    atheris.Fuzz()


def prepared(given: list[str], seeds: Sequence[bytes], donors: Sequence[object]) -> list[str]:
    """The arguments for libFuzzer: limits, dictionary, and the corpus, where none and no single input is given."""
    words = folder() / "words"
    words.write_text(dictionary(field_names(donors)))
    options = [*LIMITS, f"-dict={words}", *given]
    paths = [Path(argument) for argument in given if not argument.startswith("-")]
    if paths and paths[0].is_file():
        return options
    corpus = paths[0] if paths else folder() / "corpus"
    corpus.mkdir(exist_ok=True)
    for at, seed in enumerate(seeds):
        (corpus / f"seed-{at:03}").write_bytes(seed)
    return options if paths else [*options, str(corpus)]


if __name__ == "__main__":
    main(sys.argv[1:])
