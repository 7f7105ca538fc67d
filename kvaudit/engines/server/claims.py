"""What a whole answer must be to count: one, of the model that was asked, within its limit."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from kvaudit.engines.server.sending import Reply
from kvaudit.errors import EngineError
from kvaudit.proxy.answers import Choice
from kvaudit.records import Sampling

MOST_TOKENS = 2**31 - 1


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
