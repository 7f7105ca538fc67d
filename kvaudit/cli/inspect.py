"""`kvaudit inspect`: what a trace holds, what caches could reuse of it, and what spoils reuse, before any replay."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.cli import redacting
from kvaudit.cli.values import left_out_notes
from kvaudit.engines import DEFAULT_MODEL
from kvaudit.errors import EngineError, UsageError

if TYPE_CHECKING:
    from kvaudit.preflight.facts import About
    from kvaudit.preflight.inspection import Inspection, Reading
    from kvaudit.preflight.reuse import Caches, RequestReuse
    from kvaudit.records import Request
    from kvaudit.traces.hash_only import HashedTrace
    from kvaudit.traces.streaming import StreamedTrace

EXAMPLES = """\b
Examples:
  kvaudit inspect trace.jsonl.gz
  kvaudit inspect trace.jsonl --model Qwen/Qwen3-8B --cache-tokens 200000
  kvaudit inspect trace.jsonl --format json -o inspected
  kvaudit inspect to-share.jsonl.gz --secrets --strict
"""

UNLIMITED = "unlimited"
SEGMENTED = "segmented.jsonl.zst"
DEFAULT_CAPACITY = "500000"
VLLM_BLOCK = 16
SGLANG_PAGE = 1
_MOST_DIGITS = 18
_OTHER_BLOCKS = " (--block-size N where an id stands for another number of tokens)"


def inspect(
    context: typer.Context,
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE", help="A trace in any known format, - for standard input, a folder of WEKA traces."
        ),
    ],
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
    block_size: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens in a block of vLLM's prefix cache. [default: {VLLM_BLOCK}]")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens in a page of SGLang's radix cache. [default: {SGLANG_PAGE}]")
    ] = None,
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
    secrets: redacting.Secrets = False,
    secret_pattern: redacting.SecretPatterns = None,
) -> None:
    """Count a trace, and say what caches could reuse of it and what in it spoils reuse.

    Runs no model and needs no GPU: prompts become token ids and are served to vLLM's and SGLang's prefix caches and to
    a chunk cache, by their published rules. Of traces without prompts (Mooncake, WEKA), the hashes of blocks are served
    to the prefix caches. Exit code: 0, also with findings; with --strict 1 where an error is among them, or
    where --secrets finds anything; 2 for a bad trace or wrong usage.
    """
    if page_format not in ("terminal", "json"):
        raise UsageError(f"unknown format {page_format!r}", "known: terminal, json")
    if secrets or secret_pattern:
        from kvaudit.cli.secrets import look_for_secrets

        found = look_for_secrets(context, trace, secret_pattern or (), page_format)
        raise typer.Exit(1 if strict and found else 0)
    from kvaudit.preflight.reuse import Caches
    from kvaudit.traces.hash_only import HashedTrace
    from kvaudit.traces.streaming import open_trace

    capacity, name = _capacity(cache_tokens), "standard input" if str(trace) == "-" else str(trace)
    tables = partial(_tables, output, table)
    with open_trace(trace, trace_format) as opened:
        if isinstance(opened, HashedTrace):
            unused = [option for option, given in (("--model", model), ("--page-size", page_size)) if given]
            block_tokens = _hashed_block(opened, block_size)
            caches = Caches(capacity, block_tokens, block_tokens)
            inspection, about = _inspect_hashes(opened, name, caches, unused, tables)
        else:
            caches = Caches(capacity, block_size or VLLM_BLOCK, page_size or SGLANG_PAGE)
            inspection, about = _inspect_prompts(opened, name, model, caches, tables)
            about = replace(about, cut_command=_cut_command(trace, trace_format, model))
    if output is not None:
        _write_json(inspection, about, most, output / "inspect.json")
    _print(inspection, about, most, page_format)
    raise typer.Exit(1 if strict and inspection.has_errors else 0)


def _cut_command(trace: Path, trace_format: str | None, model: str | None) -> str:
    """The command line that cuts the trace where texts recur."""
    path = str(trace)
    named = path if path == "-" or not path.startswith("-") else f"./{path}"
    options = [*(("--format", trace_format) if trace_format else ()), *(("--model", model) if model else ())]
    return shlex.join(["kvaudit", "record", "import", named, *options, "--segment", "auto", "-o", SEGMENTED])


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
    from kvaudit.models.reading import open_tokenizer

    name = model or DEFAULT_MODEL
    try:
        opened = open_tokenizer(name)
    except EngineError as error:
        if model is not None:
            raise
        missing = f"the tokenizer of {name!r} cannot be had: {error.message}"
        return Reading(None), About(trace, None, None, None, (missing, "tokens of texts are not counted"))
    default = f"no --model was named: {name} is the default, and another model's counts differ"
    about = About(trace, name, opened.tokenizer.digest, opened.context_tokens, (default,) if model is None else ())
    return Reading(opened.tokenizer, opened.tokenizer, opened.context_tokens), about


def _tables(output: Path | None, table: Path | None) -> list[Path]:
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{output} cannot be made: {error.strerror or error}", "name a folder with -o") from error
    return [path for path in (output and output / "reuse.parquet", table) if path is not None]


def _inspect_prompts(
    opened: StreamedTrace, name: str, model: str | None, caches: Caches, tables: Callable[[], list[Path]]
) -> tuple[Inspection, About]:
    from kvaudit.preflight.inspection import inspect as inspect_requests
    from kvaudit.traces.foreign import LEFT_OUT

    first = next(opened.requests)
    reading, about = _reading(name, first, model)
    requests = chain([first], opened.requests)
    inspection = _with_tables(tables(), about, caches, lambda each: inspect_requests(requests, reading, caches, each))
    header: Mapping[str, Any] = opened.header
    told = left_out_notes(opened)
    left_out = tuple(header.get(LEFT_OUT, ())) if told else ()
    return inspection, replace(about, notes=(*about.notes, *told), left_out=left_out)


def _hashed_block(opened: HashedTrace, given: int | None) -> int:
    if given is not None and opened.is_stated and given != opened.block_tokens:
        raise UsageError(
            f"--block-size {given}: the trace's hashes stand for blocks of {opened.block_tokens} tokens",
            "leave --block-size out",
        )
    return given or opened.block_tokens


def _inspect_hashes(
    opened: HashedTrace, name: str, caches: Caches, unused: list[str], tables: Callable[[], list[Path]]
) -> tuple[Inspection, About]:
    from kvaudit.preflight.facts import About
    from kvaudit.preflight.hashed import inspect_hashes, limits
    from kvaudit.traces.tally import told_left_out

    about = About(name, None, None, None, hashes=opened.name)
    first = next(opened.requests)
    requests = chain([first], opened.requests)
    inspection = _with_tables(tables(), about, caches, lambda each: inspect_hashes(requests, caches, each))
    left_out = opened.tally.rows()
    notes = [
        *limits(inspection, opened.name, "" if opened.is_stated else _OTHER_BLOCKS),
        *opened.notes,
        *(f"{option} is not used: there are no prompts, and a page is a block" for option in unused),
        *(f"left out {told_left_out(row)}" for row in left_out),
    ]
    return inspection, replace(about, notes=tuple(notes), left_out=tuple(left_out))


def _with_tables(
    paths: list[Path], about: About, caches: Caches, inspect: Callable[[Callable[[RequestReuse], None]], Inspection]
) -> Inspection:
    """What `inspect` finds, with every row that it gives in each of the tables."""
    from kvaudit import __version__

    if not paths:
        return inspect(lambda row: None)
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

        return inspect(add)


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
