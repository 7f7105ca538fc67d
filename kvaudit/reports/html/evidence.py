"""The worst requests: full prefill's answer, the others, and whose cached KV the damaged one was made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvaudit.analysis.examples import Example, Origin
from kvaudit.reports.escape import excerpt, first_difference
from kvaudit.reports.html.parts import Exhibit, Quote, Section, Table, short, table
from kvaudit.reports.words.examples import answer_facts, context_sentence
from kvaudit.reports.words.numbers import counted, names

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

LONGEST_SHARED, LONGEST_REST = 200, 600
MOST_ANSWERS = 4


def section(audit: Audit) -> Section:
    lead = (
        "The requests whose answers differ most, per policy. What an answer shares with full prefill's is plain, the "
        "rest is marked.",
    )
    return Section("requests", "Worst requests", lead, exhibits=tuple(_exhibit(example) for example in audit.examples))


def _exhibit(example: Example) -> Exhibit:
    agreeing = f"full prefill, and {_orders(example.agreeing)}" if example.agreeing else "full prefill, no order"
    reference = example.reference_text
    quotes = [_quote(agreeing, reference, len(reference or ""))]
    for answer in example.answers[:MOST_ANSWERS]:
        split = first_difference(reference or "", answer.text or "")
        quotes.append(_quote(_orders(answer.orders), answer.text, split, answer_facts(answer)))
    more = len(example.answers) - MOST_ANSWERS
    notes = [
        *([f"{counted(more, 'further answer')} in other orders."] if more > 0 else []),
        *([context_sentence(example)] if example.origins else []),
    ]
    title = (
        f"{short(example.policy)}, request {short(example.request_id)}: {example.differing_pairs} of "
        f"{counted(example.compared_pairs, 'order pair')} differ"
    )
    return Exhibit(title, tuple(quotes), tuple(notes), next(iter(_origins(example)), None))


def _quote(source: str, text: str | None, split: int, facts: str = "") -> Quote:
    if not text:
        return Quote(source, "(no text)" if text is None else "(empty)", "", facts)
    shared, rest = text[:split], text[split:]
    if not rest:
        return Quote(source, excerpt(shared, length=LONGEST_REST), "", facts)
    before = f"...{shared[-LONGEST_SHARED:]}" if len(shared) > LONGEST_SHARED else shared
    return Quote(source, before, excerpt(rest, length=LONGEST_REST), facts)


def _origins(example: Example) -> list[Table]:
    damaged, against = example.arms
    rows = [
        [
            str(origin.segment),
            short(origin.content_id, 24),
            _who(origin.writer, origin.writer_part),
            *([_there(origin)] if against is not None else []),
            f"{origin.old_position:,}",
            f"{origin.new_position:,}",
            "yes" if origin.same_context else "no",
        ]
        for origin in example.origins
    ]
    there = [f"written in {short(against)} by"] if against is not None else []
    columns = ["segment", "content", "written by", *there, "at", "now at", "same context"]
    return table(f"Where the KV that {short(damaged)} reused came from", columns, rows, labels=len(columns) - 3)


def _there(origin: Origin) -> str:
    return _who(origin.other_writer, origin.other_writer_part) if origin.other_writer else "not reused"


def _who(request_id: str | None, part: str | None) -> str:
    return short(request_id) + ("'s prelude" if part == "prelude" else "")


def _orders(orders: Sequence[str]) -> str:
    return names([short(order) for order in orders], 6)
