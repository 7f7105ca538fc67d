"""`kvaudit record proxy`: record what a running service is asked."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.cli.recorded import counted, say

if TYPE_CHECKING:
    from kvaudit.proxy.recording import Counts

EXAMPLES = """\b
Examples:
  kvaudit record proxy --upstream http://127.0.0.1:8000 -o capture.jsonl.zst
  kvaudit record proxy --upstream https://llm.example.org --listen 127.0.0.1:9000 --ca ours.pem -o capture.jsonl.zst

\b
Then send clients to the proxy in place of the server, for instance with
OPENAI_BASE_URL=http://127.0.0.1:8899/v1. Chat completions, completions, responses and
Anthropic's messages are recorded, everything else is passed on. Ctrl-C ends the
recording; the same command later goes on in the same file.


What a client sends to prove who it is is not recorded: credential headers such as
Authorization, cookies, keys in the query, segments of the path that look random, and
fields of the body that are named like credentials (api_key, the headers of a remote tool).
Where it stands again, also in the prompt or the answer, [secret-1a2b3c4d] takes its place.
A password that is one word or shorter than eight characters is taken out of its field
only. Prompts and answers are otherwise kept as they are: import a capture with --redact
to take out keys and personal data that somebody wrote into them.
"""

_TRACE_SUFFIXES = (".zst", ".gz", ".jsonl", ".json")


def proxy(
    upstream: Annotated[str, typer.Option(metavar="URL", help="The server, http or https.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="CAPTURE", help="What is recorded; .zst and .gz at its end compress it."
        ),
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients find the proxy.")] = "127.0.0.1:8899",
    strict: Annotated[
        bool, typer.Option("--strict", help="Turn clients away (503) once something cannot be written.")
    ] = False,
    ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trust these PEM certificates, not the public ones.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")] = False,
) -> None:
    """Record what a running service is asked, as a proxy in front of it that changes nothing."""
    from kvaudit.proxy.capture import RecordingError, open_capture
    from kvaudit.proxy.recording import Recording
    from kvaudit.proxy.serving import address_of, is_loopback, listening, serve
    from kvaudit.proxy.upstream import Upstream, certificates, upstream_url

    server = Upstream(upstream_url(upstream), certificates(insecure=insecure, authority=ca))
    with listening(listen) as listener, open_capture(output, server.name, _say) as capture:
        address = address_of(listener)
        if not is_loopback(listener):
            _say(f"WARNING: listening on {address}: whoever reaches this machine can use the server and is recorded")
        _say(f"recording http://{address} -> {server.name} to {output}; Ctrl-C ends it")
        recording = Recording(capture, _say, strict=strict)
        try:
            serve(listener, server, recording, _say)
        finally:
            counts = recording.close()
        _say_recorded(output, counts)
    if counts.lost:
        raise RecordingError(
            f"{counts.lost:,} of {counts.lost + counts.recorded:,} exchanges could not be written to {output}: "
            f"{recording.last_failure}",
            "what was written before and after is whole",
        )


def _say_recorded(output: Path, counts: Counts) -> None:
    others = {outcome: count for outcome, count in counts.outcomes.items() if outcome != "complete"}
    among = "".join(f", {count:,} {outcome}" for outcome, count in sorted(others.items()))
    _say(
        f"recorded {counted(counts.recorded, 'exchange')}{among}; "
        f"passed on {counted(counts.passed_on, 'other request')}"
    )
    if counts.unread_requests or counts.unread_answers:
        _say(
            f"not read: {counted(counts.unread_requests, 'request')}, {counted(counts.unread_answers, 'answer')}; "
            "the 'problems' of their lines say why"
        )
    if counts.outcomes["complete"] and not counts.with_cached_tokens:
        _say(
            "no answer said how many of its tokens came from the cache: vLLM does with --enable-prompt-tokens-details, "
            "SGLang with --enable-cache-report"
        )
    if counts.recorded:
        _say(f"next: {_next_command(output)}")


def _next_command(output: Path) -> str:
    name = output.name
    while name.endswith(_TRACE_SUFFIXES):
        name = name.rpartition(".")[0]
    trace = output.with_name(f"{name}-trace.jsonl.gz")
    paths = [f"./{path}" if str(path).startswith("-") else str(path) for path in (output, trace)]
    return shlex.join(["kvaudit", "record", "import", paths[0], "-o", paths[1]])


def _say(text: str) -> None:
    with suppress(OSError):  # traffic goes on though nobody reads this
        say(text)
