"""`kvaudit inspect`: what a trace holds, what caches could reuse of it, and what spoils reuse, before any replay."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.errors import EngineError, UsageError

if TYPE_CHECKING:
    from kvaudit.preflight.facts import About
    from kvaudit.preflight.inspection import Inspection, Reading
    from kvaudit.preflight.reuse import Caches, RequestReuse
    from kvaudit.records import Request

EXAMPLES = """\b
Examples:
  kvaudit inspect trace.jsonl.gz
  kvaudit inspect trace.jsonl --model Qwen/Qwen3-8B --cache-tokens 200000
  kvaudit inspect trace.jsonl --format json -o inspected
"""

DEFAULT_MODEL = "smollm2-135m"
UNLIMITED = "unlimited"
DEFAULT_CAPACITY = "500000"
_MOST_DIGITS = 18


def inspect(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A trace in any known format, - for standard input.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Whose tokenizer, template and context. [default: {DEFAULT_MODEL}]"),
    ] = None,
    trace_format: Annotated[
        str | None, typer.Option("--trace-format", metavar="NAME", help="The trace's format. [default: by its content]")
    ] = None,
    cache_tokens: Annotated[
        str, typer.Option(metavar="N", help=f"What each cache holds, in tokens, or '{UNLIMITED}'.")
    ] = DEFAULT_CAPACITY,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block of vLLM's prefix cache.")] = 16,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of SGLang's radix cache.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Write reuse.parquet and inspect.json there."),
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one row a request to this Parquet file.")
    ] = None,
    page_format: Annotated[str, typer.Option("--format", "-f", metavar="NAME", help="terminal or json.")] = "terminal",
    most: Annotated[int, typer.Option(min=1, help="Findings to show, the costliest first.")] = 12,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 when a finding is an error.")] = False,
) -> None:
    """Count a trace, and say what caches could reuse of it and what in it spoils reuse.

    Runs no model and needs no GPU: prompts become token ids and are served to vLLM's and SGLang's prefix caches and to
    a chunk cache, by their published rules. Exit code: 0, also with findings; 1 with --strict and an error among them;
    2 for a bad trace or wrong usage.
    """
    if page_format not in ("terminal", "json"):
        raise UsageError(f"unknown format {page_format!r}", "known: terminal, json")
    from kvaudit.preflight.reuse import Caches
    from kvaudit.traces.streaming import iter_requests

    caches = Caches(_capacity(cache_tokens), block_size, page_size)
    requests = iter_requests(trace, trace_format)
    first = next(requests)
    reading, about = _reading("standard input" if str(trace) == "-" else str(trace), first, model)
    inspection = _inspect(chain([first], requests), reading, about, caches, _tables(output, table))
    if output is not None:
        _write_json(inspection, about, most, output / "inspect.json")
    _print(inspection, about, most, page_format)
    raise typer.Exit(1 if strict and inspection.has_errors else 0)


def _capacity(text: str) -> int | None:
    if text == UNLIMITED:
        return None
    digits = text.replace("_", "").replace(",", "")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < _MOST_DIGITS):
        raise UsageError(f"--cache-tokens {text!r} is not a number of tokens", f"write a number or '{UNLIMITED}'")
    return int(digits)


def _reading(trace: str, first: Request, model: str | None) -> tuple[Reading, About]:
    """A trace that carries token ids needs no tokenizer, unless a model is named."""
    from kvaudit.preflight.facts import About
    from kvaudit.preflight.inspection import Reading, carries_ids

    if model is None and carries_ids(first):
        note = "context and texts are not looked at: the trace carries token ids (--model NAME looks at them)"
        return Reading(None), About(trace, None, None, None, (note,))
    from kvaudit.engines.embedded.reading import open_tokenizer

    notes: list[str] = []
    for name in dict.fromkeys((model or DEFAULT_MODEL, DEFAULT_MODEL)):
        try:
            opened = open_tokenizer(name)
        except EngineError as error:
            notes.append(f"the tokenizer of {name!r} cannot be had: {error.message}")
        else:
            limit = None if notes else opened.context_tokens
            if model is None:
                notes.append(f"no --model was named: {name} is the default, and another model's counts differ")
            tokenizer = opened.tokenizer
            return Reading(tokenizer, tokenizer, limit), About(trace, name, tokenizer.digest, limit, tuple(notes))
    return Reading(None), About(trace, None, None, None, (*notes, "tokens of texts are not counted"))


def _tables(output: Path | None, table: Path | None) -> list[Path]:
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{output} cannot be made: {error.strerror or error}", "name a folder with -o") from error
    return [path for path in (output and output / "reuse.parquet", table) if path is not None]


def _inspect(
    requests: Iterable[Request], reading: Reading, about: About, caches: Caches, paths: list[Path]
) -> Inspection:
    from kvaudit import __version__
    from kvaudit.preflight.inspection import inspect as inspect_requests

    if not paths:
        return inspect_requests(requests, reading, caches)
    from kvaudit.preflight.table import reuse_table

    footer = {
        "kvaudit_version": __version__,
        "trace": about.trace,
        "tokenizer": about.tokenizer or "",
        "tokenizer_digest": about.tokenizer_digest or "",
        "cache_tokens": UNLIMITED if caches.capacity is None else str(caches.capacity),
        "block_tokens": str(caches.block_tokens),
        "page_tokens": str(caches.page_tokens),
    }
    with ExitStack() as stack:
        tables = [stack.enter_context(reuse_table(path, footer)) for path in paths]

        def add(row: RequestReuse) -> None:
            for one in tables:
                one.add(row)

        return inspect_requests(requests, reading, caches, add)


def _print(inspection: Inspection, about: About, most: int, page_format: str) -> None:
    out = sys.stdout
    if page_format == "json":
        typer.echo(_json(inspection, about, most), nl=False)
        return
    from kvaudit.preflight.page import write_page

    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    write_page(inspection, about, most, out)
    out.flush()


def _json(inspection: Inspection, about: About, most: int) -> bytes:
    import orjson

    from kvaudit.preflight.facts import as_data

    return orjson.dumps(as_data(inspection, about, most), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _write_json(inspection: Inspection, about: About, most: int, path: Path) -> None:
    from kvaudit.traces.output import whole_file

    with whole_file(path) as stream:
        stream.write(_json(inspection, about, most))
