"""Text that changes from request to request although what follows it stays: it ruins the prefix after it.

Found by comparing each prompt with the one before it in its session. What changes is short, or it is the same but for
a few numbers, ids and times: another document in the place of one is no volatile text. Patterns name what was found.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence

from kvaudit.preflight.common import common_end, common_start
from kvaudit.preflight.findings import Findings, place_of
from kvaudit.preflight.pieces import Piece, PiecedPrompt
from kvaudit.records import Request

FEWEST_TOKENS = 16
"""Fewer tokens lost are less than a block, and what a template puts around messages stays that short."""
MOST_STREAMS = 4096
MOST_CHANGED = 16
"""Tokens between the first change in a segment and the last, where more than values changes."""
MOST_VALUES = 6
"""Numbers, ids and times that change in a segment."""
LONGEST_SHOWN = 36
"""Characters of a value: a UUID, and a time with its zone."""
BEGINNING_SHOWN = 8
LONGEST_WORD = 256
"""Characters that are looked back for where a word begins."""

_RUN = re.compile(r"[\w:+./-]*")
_WORD = re.compile(r"[\w:+./-]+")
_DIGIT = re.compile(r"\d")
_DAY_OR_MONTH = re.compile(
    r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?|Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?"
    r"|May|June?|July?|Aug(?:ust)?|Sep(?:t|tember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?|[AP]M)[.:/-]*"
)
_NAMES = (
    ("a UUID", re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")),
    ("a time stamp", re.compile(r"(\d{4}-\d\d-\d\d([T ]\S*)?|\d{1,2}:\d\d(:\d\d\S*)?|1[0-9]{9}(\d{3})?(\.\d+)?)")),
    ("a number that counts", re.compile(r"#?\d+")),
    ("an id or a nonce", re.compile(r"(?=.*\d)[\w-]{6,}")),
)


class VolatileLint:
    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._last: OrderedDict[str | None, PiecedPrompt] = OrderedDict()

    def add(self, request: Request, prompt: PiecedPrompt) -> None:
        before = self._last.pop(request.session, None)
        self._last[request.session] = prompt
        if len(self._last) > MOST_STREAMS:
            self._last.popitem(last=False)
        if before is None:
            return
        pairs = zip(before.pieces, prompt.pieces, strict=False)
        index = next((i for i, (old, new) in enumerate(pairs) if old.content_id != new.content_id), None)
        if index is None:
            return
        old, new = before.pieces[index], prompt.pieces[index]
        start, end = _common(old.ids, new.ids)
        lost = end + _kept_after(before, prompt, index)
        if old.kind != new.kind or lost < FEWEST_TOKENS:
            return
        if max(old.tokens, new.tokens) - start - end > MOST_CHANGED and not _differ_in_values(old.text, new.text):
            return
        name, was, now = _change(old, new)
        place = place_of(request.request_id, request.ordinal, prompt, index)
        position = sum(piece.tokens for piece in prompt.pieces[:index]) + start
        self._findings.add(
            "volatile",
            (place.segment, new.kind, name),
            place,
            lost,
            lambda: f"{name} in the {new.kind} at token {position:,} changed ({_shown(was)} to {_shown(now)})",
        )


def _kept_after(before: PiecedPrompt, prompt: PiecedPrompt, index: int) -> int:
    """Tokens of the pieces behind the one that changed, as long as they are the same in both prompts."""
    kept = 0
    for left, right in zip(before.pieces[index + 1 :], prompt.pieces[index + 1 :], strict=False):
        if left.content_id != right.content_id:
            break
        kept += right.tokens
    return kept


def _common(old: Sequence[object], new: Sequence[object]) -> tuple[int, int]:
    """What both begin with, and what both end with behind that."""
    start = common_start(old, new)
    return start, min(common_end(old, new), len(old) - start, len(new) - start)


def _differ_in_values(old: str | None, new: str | None) -> bool:
    """Whether two texts are the same but for a few numbers, ids, times and names of days and months."""
    if old is None or new is None:
        return False
    start, end = _common(old, new)
    was, now = (text[_word_start(text, start) : _word_end(text, len(text) - end)] for text in (old, new))
    return sum(map(_is_value, _WORD.findall(now))) <= MOST_VALUES and _without_values(was) == _without_values(now)


def _is_value(word: str) -> bool:
    return bool(_DIGIT.search(word) or _DAY_OR_MONTH.fullmatch(word))


def _without_values(text: str) -> str:
    return _WORD.sub(lambda word: "0" if _is_value(word[0]) else word[0], text)


def _word_start(text: str, position: int) -> int:
    first = max(0, position - LONGEST_WORD)
    while position > first and _RUN.fullmatch(text[position - 1]):
        position -= 1
    return position


def _word_end(text: str, position: int) -> int:
    found = _RUN.match(text, position)
    return found.end() if found else position


def _change(old: Piece, new: Piece) -> tuple[str, str, str]:
    """What changed, by name, as it was and as it is."""
    if old.text is None or new.text is None:
        return "a run of token ids", "", ""
    start = _word_start(new.text, common_start(old.text, new.text))
    was, now = (_run_at(text, start) for text in (old.text, new.text))
    for name, pattern in _NAMES:
        if pattern.fullmatch(was) and pattern.fullmatch(now):
            return name, was, now
    return "text", was, now


def _shown(value: str) -> str:
    """A value, or where it is longer than a time, only how it begins: it may be a secret."""
    if len(value) <= LONGEST_SHOWN:
        return repr(value)
    return f"{value[:BEGINNING_SHOWN]!r}... of {len(value):,} characters"


def _run_at(text: str, start: int) -> str:
    found = _RUN.match(text, start)
    run = found[0].rstrip(".,:/-") if found else ""
    return run or text[start : start + BEGINNING_SHOWN]
