"""Text that changes from request to request although what follows it stays: it ruins the prefix after it.

Found by comparing each prompt with the one before it in its session; patterns only name what was found.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from kvaudit.preflight.common import common_end, common_start
from kvaudit.preflight.findings import Findings, place_of
from kvaudit.preflight.pieces import Piece, PiecedPrompt
from kvaudit.records import Request

FEWEST_TOKENS = 16
"""Fewer tokens lost are less than a block, and what a template puts around messages stays that short."""
MOST_STREAMS = 4096

_RUN = re.compile(r"[\w:+./-]*")
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
        lost = _kept_after(before, prompt, index)
        if old.kind != new.kind or lost < FEWEST_TOKENS:
            return
        name, was, now = _change(old, new)
        place = place_of(request.request_id, request.ordinal, prompt, index)
        position = sum(piece.tokens for piece in prompt.pieces[:index]) + common_start(old.ids, new.ids)
        self._findings.add(
            "volatile",
            (place.segment, new.kind, name),
            place,
            lost,
            lambda: f"{name} in the {new.kind} at token {position:,} changed ({was!r:.50} to {now!r:.50})",
        )


def _kept_after(before: PiecedPrompt, prompt: PiecedPrompt, index: int) -> int:
    """Tokens that follow the change and are the same in both prompts: the piece's own end, then whole pieces."""
    old, new = before.pieces[index], prompt.pieces[index]
    kept = common_end(old.ids, new.ids)
    for left, right in zip(before.pieces[index + 1 :], prompt.pieces[index + 1 :], strict=False):
        if left.content_id != right.content_id:
            break
        kept += right.tokens
    return kept


def _change(old: Piece, new: Piece) -> tuple[str, str, str]:
    """What changed, by name, as it was and as it is."""
    if old.text is None or new.text is None:
        return "a run of token ids", "", ""
    start = common_start(old.text, new.text)
    while start and _RUN.fullmatch(new.text[start - 1]):
        start -= 1
    was, now = (_run_at(text, start) for text in (old.text, new.text))
    for name, pattern in _NAMES:
        if pattern.fullmatch(was) and pattern.fullmatch(now):
            return name, was, now
    return "text", was, now


def _run_at(text: str, start: int) -> str:
    found = _RUN.match(text, start)
    run = found[0].rstrip(".,:/-") if found else ""
    return run or text[start : start + 50]
