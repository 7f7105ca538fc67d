"""An inspection as a page for people: fits 80 columns, needs no colour, and is the same text when it is piped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from kvaudit.preflight.facts import MOST_BREAKS, About, after_break, breaks, share
from kvaudit.preflight.findings import RULES, Finding
from kvaudit.preflight.inspection import HashedFacts, Inspection
from kvaudit.preflight.plot import BLOCKS, axis, strip
from kvaudit.preflight.reuse import RATIOS, BreakTotal, binned_rates
from kvaudit.reports.escape import visible
from kvaudit.reports.terminal import NARROWEST, WIDEST
from kvaudit.reports.terminal.layout import heading, sentences, table
from kvaudit.reports.words.numbers import percent

CACHES = (
    ("vllm_reused", "vLLM"),
    ("sglang_reused", "SGLang"),
    ("chunk_reused_any", "any position"),
    ("chunk_reused_stop_at_miss", "stop at miss"),
)
_EXACT = 2
"""Of `CACHES` the exact prefix caches, which need no prompts."""
HOW = {
    "empty": "nothing cached",
    "differs": "differs",
    "extends": "goes on",
    "evicted": "was evicted",
}
PLOT_WIDTH = 56


def write_page(inspection: Inspection, about: About, most: int, out: TextIO) -> None:
    """Write the page to `out`, with the `most` costliest findings."""
    console = Console(file=out, highlight=False, markup=False, emoji=False)
    console.width = min(max(console.width, NARROWEST), WIDEST)
    with console.capture() as captured:
        for part in _parts(inspection, about, most, ascii_only=not _writes_blocks(out)):
            console.print(part, soft_wrap=isinstance(part, Text) and part.overflow == "ignore")
    out.writelines(f"{line.rstrip()}\n" for line in captured.get().split("\n")[:-1])


def _writes_blocks(out: TextIO) -> bool:
    try:
        BLOCKS.encode(out.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _parts(inspection: Inspection, about: About, most: int, ascii_only: bool) -> Iterator[RenderableType]:
    yield from _counts(inspection, about)
    if inspection.totals.requests:
        yield from _reuse(inspection)
        yield from _over_time(inspection, ascii_only)
        yield from _breaks(inspection)
    if inspection.hashed:
        return
    if inspection.totals.requests:
        yield from _recompute(inspection)
    yield from _findings(inspection.findings, about, most)


def _counts(inspection: Inspection, about: About) -> Iterator[RenderableType]:
    totals = inspection.totals
    yield Text(f"{_counted(inspection.requests, 'request')}, {_counted(totals.prompt_tokens, 'prompt token')}", "bold")
    if inspection.hashed:
        yield from sentences([*_hashed_counts(inspection, inspection.hashed, about), *about.notes])
        return
    without = "token ids that the trace carries, no tokenizer" if totals.requests else "no tokenizer and no token ids"
    tokenizer = f"tokens of the tokenizer of {about.tokenizer}" if about.tokenizer else without
    longest = f"longest prompt {totals.longest_prompt:,} tokens (request {totals.longest_request!r})"
    limit = f", the model takes {about.context_tokens:,}" if about.context_tokens else ""
    lines = [
        f"{about.trace}: {_counted(len(inspection.sessions), 'session')}, {_counted(inspection.chats, 'chat')}, "
        f"{_counted(inspection.distinct_chunks, 'distinct chunk')}; {tokenizer}",
        f"{longest}{limit}" if totals.requests else "no request could be counted",
    ]
    if totals.prelude_tokens:
        lines.append(f"{totals.prelude_tokens:,} tokens more in preludes, served before their requests")
    if inspection.left_out:
        lines.append(
            f"left out: {_counted(inspection.left_out, 'request')} with texts, for which there is no tokenizer"
        )
    if inspection.refused:
        lines.append(f"left out for want of token ids: {_counted(inspection.refused, 'request')} (see findings)")
    if inspection.unchecked_pairs:
        lines.append(
            f"not tokenised together: {inspection.unchecked_pairs:,} pairs of neighbours, beyond the first ones"
        )
    yield from sentences([*lines, *about.notes])
    if inspection.kinds:
        rows = [
            (kind, f"{count:,}", f"{inspection.kind_tokens[kind]:,}", _share(inspection, inspection.kind_tokens[kind]))
            for kind, count in sorted(inspection.kinds.items(), key=lambda one: (-inspection.kind_tokens[one[0]], one))
        ]
        yield from heading("Segments")
        yield table(("kind", "segments", "tokens", "share"), rows)


def _hashed_counts(inspection: Inspection, hashed: HashedFacts, about: About) -> list[str]:
    totals = inspection.totals
    sessions = f"{_counted(len(inspection.sessions), 'session')}, " if inspection.sessions else ""
    return [
        f"{about.trace}, a {about.hashes} trace of lengths and hashes: {sessions}"
        f"{_counted(hashed.blocks, 'full block')} of {inspection.caches.block_tokens:,} tokens, "
        f"{hashed.distinct_blocks:,} distinct; {_counted(hashed.answer_tokens, 'answer token')}",
        f"longest prompt {totals.longest_prompt:,} tokens (request {totals.longest_request!r})",
    ]


def _reuse(inspection: Inspection) -> Iterator[RenderableType]:
    totals, caches = inspection.totals, inspection.caches
    rows = [
        (f"exact prefix, vLLM (blocks of {caches.block_tokens})", totals.vllm_reused),
        (f"exact prefix, SGLang (pages of {caches.page_tokens})", totals.sglang_reused),
    ]
    if not inspection.hashed:
        rows += [
            ("chunks at any position", totals.chunk_reused_any),
            ("chunks up to the first miss (LMCache)", totals.chunk_reused_stop_at_miss),
        ]
    yield from heading("What could be reused")
    yield table(("cache", "tokens", "hit rate"), [(name, f"{n:,}", _share(inspection, n)) for name, n in rows])
    room = "without a limit" if caches.capacity is None else f"of {caches.capacity:,} tokens (--cache-tokens)"
    lines = [f"One request at a time, in the trace's order, prompts only, each cache {room}."]
    if totals.too_large:
        lines.append(f"{totals.too_large:,} prompts do not fit into the cache and count as not reused.")
    yield from sentences(lines)


def _over_time(inspection: Inspection, ascii_only: bool) -> Iterator[RenderableType]:
    totals = inspection.totals
    yield from heading("Hit rate over the trace")
    caches = CACHES[:_EXACT] if inspection.hashed else CACHES
    width = max(len(name) for name in ("request", *(name for _, name in caches)))
    drawn = ""
    for column, name in caches:
        drawn = strip(binned_rates(totals, column, PLOT_WIDTH), ascii_only)
        total = percent(share(getattr(totals, column), totals.prompt_tokens), 0)
        yield Text(f"  {name:<{width}} {drawn} {total}", no_wrap=True, overflow="crop")
    yield Text(f"  {'request':<{width}} {axis(totals.requests, len(drawn))}", no_wrap=True, overflow="crop")
    levels = "0 to 9: tens of per cent" if ascii_only else "eighths of the prompt tokens, a full block is all of them"
    yield from sentences([f"{levels}; a dot: nothing"])


def _breaks(inspection: Inspection) -> Iterator[RenderableType]:
    found = breaks(inspection)
    if not found:
        return
    after = after_break(inspection)
    yield from heading("Where the cached prefix ends")
    rows = [
        (f"{kind}: {HOW[how]}", f"{total.requests:,}", f"{total.tokens:,}") for kind, how, total in found[:MOST_BREAKS]
    ]
    yield table(
        ("at a block" if inspection.hashed else "at a segment of kind", "requests", f"{after} tokens after it"), rows
    )
    lines = [line for kind, how, total in found[:MOST_BREAKS] if (line := _worst(kind, how, total, after))]
    if len(found) > MOST_BREAKS:
        lines.append(f"{len(found) - MOST_BREAKS} more in --format json")
    yield from sentences(lines)


def _worst(kind: str, how: str, total: BreakTotal, after: str) -> str | None:
    row = total.worst
    if row is None or row.broken is None or not total.worst_tokens:
        return None
    broken = row.broken
    noun = "block" if after == "computed" else "segment"
    segment = f"{noun} {broken.segment}" if broken.segment else "the template's glue"
    source = f", after the prefix of request {broken.prefix_from!r}" if broken.prefix_from is not None else ""
    return (
        f"{kind}, {HOW[how]}: request {row.request_id!r} at {segment}, token {broken.token:,}{source}: "
        f"{total.worst_tokens:,} {'tokens are computed' if after == 'computed' else 'cached tokens go unused'}"
    )


def _recompute(inspection: Inspection) -> Iterator[RenderableType]:
    totals = inspection.totals
    everything = totals.prompt_tokens
    exact = {"vLLM": everything - totals.vllm_reused, "SGLang": everything - totals.sglang_reused}
    rows: list[tuple[str, ...]] = [
        ("nothing reused", f"{everything:,}", "-", "-", "-"),
        *((f"exact prefix, {name}", f"{n:,}", _saved(n, everything), "-", "-") for name, n in exact.items()),
    ]
    for lookup in ("any", "stop-at-miss"):
        for ratio in RATIOS:
            n = totals.prefilled[ratio, lookup]
            saved = [_saved(n, against) for against in (everything, *exact.values())]
            rows.append((f"r = {ratio:.2f}, {lookup}", f"{n:,}", *saved))
    yield from heading("What paying the recompute ratio would save")
    yield table(("prefill", "tokens", "saved", "against vLLM", "against SGLang"), rows)
    yield from sentences(
        [
            "r: share of the reused tokens that is computed again. saved: against nothing reused, then against the "
            "exact prefix caches (below zero: it computes more)."
        ]
    )


def _findings(findings: Sequence[Finding], about: About, most: int) -> Iterator[RenderableType]:
    errors = sum(finding.rule.severity == "error" for finding in findings)
    yield from heading(f"Findings: {_counted(errors, 'error')}, {_counted(len(findings) - errors, 'warning')}")
    for finding in findings[:most]:
        rule, place = finding.rule, finding.place
        yield from sentences([f"{rule.severity} [{finding.code}] {rule.title}: {finding.tokens:,} tokens"])
        where = f"request {place.request_id!r}" if place.request_id else "the trace"
        segment = f", segment {place.segment}" if place.segment else ""
        times = f" (first of {finding.occurrences:,})" if finding.occurrences > 1 else ""
        yield from sentences(
            [f"{where}{segment}{times}: {finding.what}", f"do: {rule.remedy}{':' * rule.cuts}"], indent=4
        )
        if rule.cuts:
            yield Text(f"    {visible(about.cut_command)}", no_wrap=True, overflow="ignore")
    if len(findings) > most:
        tokens = sum(finding.tokens for finding in findings[most:])
        yield from sentences([f"{len(findings) - most:,} more findings, {tokens:,} tokens (--most shows more)"])
    codes = dict.fromkeys(finding.code for finding in findings[:most])
    yield from sentences([f"tokens of [{code}]: {RULES[code].counts}" for code in codes])


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _share(inspection: Inspection, tokens: int) -> str:
    return percent(share(tokens, inspection.totals.prompt_tokens))


def _saved(tokens: int, against: int) -> str:
    """`percent` is for shares from 0 to 1, and an exact prefix cache may save more."""
    saved = 1 - share(tokens, against) if against else 0.0
    return f"-{percent(-saved)}" if saved < 0 else percent(saved)
