"""What an answer must be to count: whole, one, of the model that was asked, within its limit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import orjson

from kvaudit.engines.server.replies import Reply
from kvaudit.errors import EngineError
from kvaudit.proxy.answers import Choice
from kvaudit.records import Sampling

MOST_TOKENS = 2**31 - 1
_AT_LIMIT = "length"


class _End(IntEnum):
    """How an answer that ended by itself shows that it is whole, the surest way last."""

    BARE = 0
    CLOSED = 1
    REASONED = 2


@dataclass(slots=True)
class Endings:
    """How one server ends its answers: the surest way that was seen, and the least sure that an answer was taken with.

    Some give a reason to answers that reached their limit alone, so that such a reason tells nothing of the others.
    """

    url: str
    _surest: _End = _End.BARE
    _least: _End = _End.REASONED

    def doubt(self, reply: Reply, limit: int | None) -> str | None:
        """Why an answer whose stream ended properly may have been cut nevertheless; None where it is whole.

        Raises EngineError where answers that were taken as whole must be doubted now.
        """
        reasons = {choice.finish_reason for choice in reply.answer.choices.values()} or {None}
        end = _End.CLOSED if reply.is_closed else _End.BARE
        if reasons.isdisjoint({None, _AT_LIMIT}):
            end = _End.REASONED
        self._surest = max(self._surest, end)
        if self._least < self._surest:
            raise EngineError(
                f"the server at {self.url} gives a finish reason, or usage, to some answers and none to others, which "
                "may have been cut",
                "see the server's log, and replay into another folder",
            )
        if reasons == {_AT_LIMIT} or (limit is not None and reply.tokens >= limit):
            return None
        if end < self._surest:
            what = "finish reason" if self._surest is _End.REASONED else "usage"
            return f"the answer came without a {what}, and earlier ones had one: it may have been cut"
        self._least = end
        return None


@dataclass(slots=True)
class Claims:
    """What the first answer said of itself, and every further one must say too."""

    model: str | None = None
    fingerprint: str | None = None

    def check(self, reply: Reply, sampling: Sampling) -> Choice:
        """The answer. Raises EngineError for one that is not what was asked for."""
        choices = reply.answer.choices
        if len(choices) != 1:
            raise EngineError(
                f"the server answered with {len(choices)} choices, and one was asked for",
                "look whether --base-url is that of an OpenAI-compatible API",
            )
        self._check_counts(reply)
        choice = next(iter(choices.values()))
        self._same("model", self.model, reply.answer.model)
        self._same("system_fingerprint", self.fingerprint, reply.fingerprint)
        self.model = self.model or reply.answer.model
        self.fingerprint = self.fingerprint or reply.fingerprint
        tokens = reply.answer.counts()["completion_tokens"]
        if tokens is not None and tokens > max(1, sampling.max_tokens):
            raise EngineError(
                f"the server answered with {tokens} tokens, and {max(1, sampling.max_tokens)} were the limit",
                "answers that are cut elsewhere cannot be compared",
            )
        return choice

    def _check_counts(self, reply: Reply) -> None:
        for name, count in reply.answer.counts().items():
            if count is not None and not 0 <= count <= MOST_TOKENS:
                raise EngineError(f"the server counted {count} {name.replace('_', ' ')}")

    def _same(self, what: str, before: str | None, now: str | None) -> None:
        if before is not None and now is not None and before != now:
            raise EngineError(
                f"another model answers than before: {what} was {before!r}, is {now!r}",
                "an audit is of one deployment: replay into another folder",
            )


def answer_text(choice: Choice) -> str:
    """All that the model said. Reasoning, a refusal and calls of tools are answers as well as text is."""
    parts = ["".join(choice.text)]
    for name, pieces in (("reasoning", choice.reasoning), ("refusal", choice.refusal)):
        if pieces:
            parts.append(f"[{name}] {''.join(pieces)}")
    calls = [{"name": call.name, "arguments": "".join(call.arguments)} for call in choice.tool_calls]
    if calls:
        parts.append(f"[tool calls] {orjson.dumps(calls).decode()}")
    return "\n".join(part for part in parts if part)
