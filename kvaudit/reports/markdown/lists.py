"""Folded lists: which requests change with the order, the worst of them with their answers, the settings in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvaudit.analysis.audit import section
from kvaudit.analysis.examples import Example
from kvaudit.reports.escape import EXCERPT, first_difference
from kvaudit.reports.markdown.layout import Block, code, folded, html_code, prose
from kvaudit.reports.words.examples import answer_facts, context_sentence
from kvaudit.reports.words.numbers import MOST_NAMES, counted

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

SECTIONS = ("trace", "engine", "settings", "libraries")


def changing_requests(audit: Audit, limit: int) -> Iterator[Block]:
    """For each policy the requests that two orders answer differently: most differing pairs first, then earliest."""
    for policy in audit.grid.policies:
        differing, compared = np.zeros((2, audit.requests), np.int64)
        for pair in audit.pairs:
            if (pair.kind, pair.policy) == ("orders", policy):
                differing += pair.differs
                compared += pair.comparable
        changing = np.flatnonzero(differing)
        worst_first = changing[np.argsort(-differing[changing] / compared[changing], kind="stable")]
        if not len(changing):
            continue
        total = counted(int((compared > 0).sum()), "request")
        summary = f"{html_code(policy)}: {len(changing):,} of {total} changed with the order"
        rows = (
            f"- {code(audit.grid.request_ids[int(request)].as_py())}: {differing[request]} of "
            f"{counted(int(compared[request]), 'order pair')} differ"
            for request in worst_first
        )
        yield folded(summary, rows, len(changing), "requests change", limit)


def worst_requests(audit: Audit, limit: int) -> Iterator[Block]:
    if audit.examples:
        rows = (_example(example) for example in audit.examples)
        yield folded("Worst requests with their answers", rows, len(audit.examples), "requests", limit)


def settings_in_force(audit: Audit, limit: int) -> Iterator[Block]:
    settings = [pair for name in SECTIONS for pair in _flat(name, section(audit.manifest, name))]
    if settings:
        rows = (f"- {code(name)}: {setting_value(value)}" for name, value in settings)
        yield folded("Settings in force", rows, len(settings), "settings", limit)


def setting_value(value: Any) -> str:
    return "unset" if value is None else code(str(value))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list | tuple):
        yield name, ", ".join(str(item) for item in value)
    else:
        yield name, value


def _example(example: Example) -> str:
    head = (
        f"- {code(example.policy)}, request {code(example.request_id)}: {example.differing_pairs} of "
        f"{counted(example.compared_pairs, 'order pair')} differ"
    )
    worst = example.answers[0]
    split = first_difference(example.reference_text or "", worst.text or "")
    lines = [f"  - full prefill{_orders(example.agreeing)}: {_answer_text(example.reference_text, split)}"]
    for answer in example.answers:
        split = first_difference(example.reference_text or "", answer.text or "")
        shown = f"{_orders(answer.orders).removeprefix(', ')}: {_answer_text(answer.text, split)}"
        lines.append(f"  - {shown}. {prose(answer_facts(answer))}".rstrip())
    if example.origins:
        lines.append(f"  - {prose(context_sentence(example))}")
    return "\n".join([head, *lines])


def _orders(orders: tuple[str, ...]) -> str:
    more = f" and {len(orders) - MOST_NAMES} more" if len(orders) > MOST_NAMES else ""
    return "".join(f", {code(order)}" for order in orders[:MOST_NAMES]) + more


def _answer_text(text: str | None, around: int) -> str:
    return "(no text)" if text is None else code(text, around, EXCERPT)
