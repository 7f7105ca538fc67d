"""What lint finds: each finding with a code, a place, what it costs in tokens over the trace, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from kvaudit.preflight.pieces import PiecedPrompt

Severity = Literal["error", "warning"]
MOST_GROUPS = 10_000
"""Groups that are told apart under one code, so that memory is bounded; later ones go into one group."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`counts` says what a finding's tokens are. `cuts`: the remedy is to cut prompts, for which there is a command."""

    severity: Severity
    title: str
    counts: str
    remedy: str
    cuts: bool = False


RULES = MappingProxyType(
    {
        "nothing-reused": Rule(
            "error",
            "no segment recurs",
            "tokens of the whole trace, which a replay would end inconclusive on",
            "record more requests, or cut prompts where they recur",
            cuts=True,
        ),
        "recurs-inside": Rule(
            "warning",
            "texts recur inside messages, behind other text",
            "tokens that stood inside an earlier message at another place: no cache finds them as prompts are cut now",
            "cut prompts where texts recur, and inspect what that writes",
            cuts=True,
        ),
        "nothing-before-a-miss": Rule(
            "warning",
            "nothing is reused by a lookup that stops at the first miss",
            "tokens that a lookup at any position would reuse",
            "put what recurs first, or replay with --lookup any",
        ),
        "chat-preset": Rule(
            "warning",
            "the default preset of a replay is made for documents between separators, not for chats",
            "tokens of the chat template: gaps, as separators are, whose K and V --like lmcache leaves at zero, the "
            "very first among them. Its mask, too, changes answers where a conversation only grows",
            "replay with --like ideal as well: what differs there is the doing of the reuse, not of the preset",
        ),
        "beyond-context": Rule(
            "error",
            "prompts longer than the model's context",
            "tokens of these prompts, which a replay refuses",
            "shorten the window or take a model with a longer context",
        ),
        "refused": Rule(
            "error",
            "requests that do not become token ids",
            "none: what has no ids has no count",
            "mend the request, or take it out of the trace",
        ),
        "context": Rule(
            "warning",
            "segments that tokenise otherwise in context",
            "tokens of these segments, wherever they stand so",
            "end segments where the tokenizer does (before a space, after a line end), or serve token ids",
        ),
        "separator-context": Rule(
            "warning",
            "separators that become other tokens beside their neighbours",
            "tokens of the segments behind such separators: a server that is sent text looks for the separator's own "
            "tokens, misses them there, and does not reuse what follows (a replay cuts before it tokenises, and does)",
            "send token ids, each segment tokenised alone; or take a separator that stays the same beside any text, "
            "such as a special token, and set the server to it",
        ),
        "volatile": Rule(
            "warning",
            "text that changes before text that stays",
            "tokens after it that were the same as in the request before",
            "move it to the end of the prompt, round it, or leave it out",
        ),
        "form": Rule(
            "warning",
            "segments that differ in form only",
            "tokens of the repeats, computed again although nothing new is said",
            "write them in one form: sorted JSON keys, one kind of white space, Unicode NFC",
        ),
        "template-drift": Rule(
            "warning",
            "the chat template renders an earlier turn otherwise later",
            "tokens of the earlier prompt from there on, which no prefix cache finds again",
            "keep earlier turns as they were served (a template that leaves think blocks and white space alone)",
        ),
        "null-content": Rule(
            "warning",
            "the chat template writes a null content as text",
            "tokens of that text",
            "send an empty string in place of null, or mend the template",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """`segment` counts the trace's segments from 1; None for template glue and for whole requests."""

    request_id: str
    ordinal: int
    segment: int | None = None
    kind: str | None = None


@dataclass(slots=True)
class Finding:
    """`place` and `what` tell of the first of `occurrences`, `tokens` is the cost of all of them."""

    code: str
    place: Place
    what: str
    occurrences: int = 0
    tokens: int = 0

    @property
    def rule(self) -> Rule:
        return RULES[self.code]


class Findings:
    def __init__(self) -> None:
        self._groups: dict[str, dict[Hashable, Finding]] = {}

    def add(
        self,
        code: str,
        group: Hashable,
        place: Place,
        tokens: int,
        what: str | Callable[[], str],
        occurrences: int = 1,
    ) -> None:
        """Count occurrences. Of `what`, or what it returns, the first of a group is kept."""
        groups = self._groups.setdefault(code, {})
        if group not in groups and len(groups) >= MOST_GROUPS:
            group = None
        finding = groups.get(group)
        if finding is None:
            finding = groups[group] = Finding(code, place, what if isinstance(what, str) else what())
        finding.occurrences += occurrences
        finding.tokens += tokens

    def ranked(self) -> list[Finding]:
        """The costliest first; of equal cost, errors first, then by code and place."""
        found = [finding for groups in self._groups.values() for finding in groups.values()]
        return sorted(found, key=_rank)


def _rank(finding: Finding) -> tuple[int, bool, str, int, int]:
    place = finding.place
    return (-finding.tokens, finding.rule.severity != "error", finding.code, place.ordinal, place.segment or 0)


def place_of(request_id: str, ordinal: int, prompt: PiecedPrompt, index: int) -> Place:
    segment = prompt.segments[index]
    return Place(request_id, ordinal, None if segment is None else segment + 1, prompt.pieces[index].kind)
