"""The worst requests with both answers side by side, and whose cached KV the damaged ones were made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvaudit.analysis.examples import Example, Origin
from kvaudit.reports.escape import excerpt, first_difference, visible
from kvaudit.reports.terminal.layout import heading, sentences
from kvaudit.reports.words.examples import answer_facts, context_sentence
from kvaudit.reports.words.numbers import counted, names

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

MOST_ORIGINS = 4


def parts(audit: Audit) -> Iterator[RenderableType]:
    if not audit.examples:
        return
    yield from heading("Worst requests")
    for index, example in enumerate(audit.examples):
        if index:
            yield Text()
        yield from _example(example)


def _example(example: Example) -> Iterator[RenderableType]:
    worst = example.answers[0]
    yield Text(
        f"{visible(example.policy)}, request {visible(example.request_id)}: {example.differing_pairs} of "
        f"{counted(example.compared_pairs, 'order pair')} differ"
    )
    agreeing = names(example.agreeing) if example.agreeing else "no order"
    both = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), header_style="", expand=True)
    both.add_column(f"full prefill, {agreeing}", ratio=1, overflow="fold")
    both.add_column(names(worst.orders), ratio=1, overflow="fold")
    split = first_difference(example.reference_text or "", worst.text or "")
    both.add_row(_cell(example.reference_text, split), _cell(worst.text, split))
    yield Padding(both, (0, 0, 0, 2))
    facts = answer_facts(worst, len(example.answers) - 1)
    yield from sentences([*filter(None, [facts]), *_origins(example)])


def _cell(text: str | None, around: int) -> Text:
    return Text("(no text)" if text is None else excerpt(text, around))


def _origins(example: Example) -> list[str]:
    if not example.origins:
        return []
    _, against = example.arms
    lines = [context_sentence(example)]
    changed = [origin for origin in example.origins if not _same_writer(origin)]
    if against is not None and changed:
        shown = "; ".join(_writer(origin) for origin in changed[:MOST_ORIGINS])
        more = f"; and {len(changed) - MOST_ORIGINS} more" if len(changed) > MOST_ORIGINS else ""
        lines.append(f"Written by another request than in {visible(against)}: {shown}{more}.")
    return lines


def _same_writer(origin: Origin) -> bool:
    return (origin.writer, origin.writer_part) == (origin.other_writer, origin.other_writer_part)


def _writer(origin: Origin) -> str:
    there = _who(origin.other_writer, origin.other_writer_part) if origin.other_writer else "not reused"
    return f"segment {origin.segment} by {_who(origin.writer, origin.writer_part)} (there: {there})"


def _who(request_id: str, part: str | None) -> str:
    return visible(request_id) + ("'s prelude" if part == "prelude" else "")
