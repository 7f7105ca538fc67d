"""What a server answered, or how it failed to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvaudit.engines.server.saying import error_in_place
from kvaudit.proxy.answers import Answer

Failing = Literal["gone", "lost", "slow", "busy", "broken", "refused"]
"""`gone`: nobody takes connections. `lost`: the connection broke before the answer was whole. `slow`: nothing came in
time. `busy`: 429 or 503. `broken`: another 5xx, or an error in place of an answer. `refused`: another status."""


class AttemptError(Exception):
    """One attempt failed. `status` is the answer's, None where there was none; `wait`: seconds that it asks for; `url`:
    the server's that was asked a question.
    """

    def __init__(self, kind: Failing, told: str, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(told)
        self.kind, self.told, self.status, self.wait = kind, told, status, wait
        self.url: str | None = None


@dataclass(slots=True)
class Reply:
    """What a server answered. Times in milliseconds from when the request was sent; `ttft_ms` to the first content.

    `ended`: the stream has told its end, or the body was whole. `is_closed`: also usage came behind all content, in an
    event of its own, as OpenAI's API has it, or the body was whole.
    """

    answer: Answer
    token_ids: list[int] = field(default_factory=list)
    timings: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    ended: bool = False
    is_closed: bool = False
    ttft_ms: float | None = None
    total_ms: float = 0.0

    def take(self, event: Mapping[str, Any], *, whole: bool = False) -> bool:
        """One event of a stream, or a whole body; whether it brought something of the answer."""
        if isinstance(event.get("timings"), dict):
            self.timings = event["timings"]
        if isinstance(event.get("system_fingerprint"), str):
            self.fingerprint = event["system_fingerprint"]
        self.answer.error = self.answer.error or error_in_place(event, whole=whole)
        known, choices = len(self.token_ids), event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            ids = choice.get("token_ids") if isinstance(choice, dict) else None
            if isinstance(ids, list) and all(type(token) is int for token in ids):
                self.token_ids += ids
        if whole:
            self.answer.set_whole(event)
            self.ended = self.is_closed = True
            return True
        told = self.answer.add_event(event) or len(self.token_ids) > known
        self.is_closed = bool(event.get("usage") and not choices) or (self.is_closed and not told)
        return told

    @property
    def tokens(self) -> int:
        """How many tokens it has at least."""
        return max(self.answer.counts()["completion_tokens"] or 0, len(self.token_ids))
