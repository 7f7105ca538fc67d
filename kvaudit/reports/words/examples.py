"""How one damaged answer differs, and what it reused, as sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.reports.escape import visible
from kvaudit.reports.words.numbers import counted, number

if TYPE_CHECKING:
    from kvaudit.analysis.examples import Answer, Example


def answer_facts(answer: Answer, further: int = 0) -> str:
    """How an answer differs from full prefill's, in one sentence; nothing where that was not measured. `further`: how
    many more answers differ, in other orders."""
    facts = []
    if answer.edit_distance is not None:
        facts.append(f"edit distance {answer.edit_distance:,}")
    if answer.first_difference is not None:
        facts.append(f"first difference at token {answer.first_difference}")
    if answer.margin is not None:
        facts.append(f"margin of the two best logits there {number(answer.margin)}")
    if further:
        facts.append(f"{counted(further, 'further answer')} in other orders")
    line = ", ".join(facts)
    return f"{line[0].upper()}{line[1:]}." if facts else ""


def context_sentence(example: Example) -> str:
    """How much of what the damaged answer reused had been computed in another context."""
    foreign = sum(not origin.same_context for origin in example.origins)
    return (
        f"In {visible(example.arms[0])} {foreign} of {counted(len(example.origins), 'reused segment')} had been "
        "computed after other tokens than stand before them now."
    )
