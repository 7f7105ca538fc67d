"""A prompt as the body of a request: greedy, seeded, streamed, with the fields that the trace carries kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import orjson

from kvaudit.engines.server.jsons import object_in
from kvaudit.engines.server.options import Api
from kvaudit.records import Sampling, Wording

LimitName = Literal["max_tokens", "max_completion_tokens"]
OPTIONAL = ("return_token_ids", "stream_options", "seed")
"""Fields that a server may refuse, in the order in which they are left out until it does not.

`return_token_ids` is vLLM's: the answer's token ids. `stream_options` asks for usage behind the stream."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How this server is asked. `limit` is the name of the field with the answer's token limit."""

    model: str
    api: Api
    seed: int
    left_out: tuple[str, ...] = ()
    limit: LimitName = "max_tokens"

    def without(self, *names: str) -> Manner:
        return replace(self, left_out=names)

    def question(self, wording: Wording, sampling: Sampling, salt: str | None = None) -> tuple[str, bytes]:
        """Path and body. `salt`: a namespace in the server's cache that this request alone is in."""
        body: dict[str, Any] = orjson.loads(wording.extra) if wording.extra else {}
        body |= {"model": self.model, **_asked(wording, self.api)}
        body |= {self.limit: max(1, sampling.max_tokens), "temperature": 0, "stream": True}
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        body |= {name: value for name, value in self._optional().items() if name not in self.left_out}
        if salt is not None:
            body["cache_salt"] = salt
        return ("/chat/completions" if "messages" in body else "/completions"), orjson.dumps(body)

    def _optional(self) -> Mapping[str, Any]:
        return {"return_token_ids": True, "stream_options": {"include_usage": True}, "seed": self.seed}


def most_tokens(body: bytes) -> int | None:
    """The limit of a question's answer; None for a question of somebody else's."""
    told = map(object_in(body).get, get_args(LimitName))
    return next((limit for limit in told if type(limit) is int), None)


def _asked(wording: Wording, api: Api) -> dict[str, Any]:
    """The prompt's own fields. Messages stay messages; a text becomes one message where only a chat is offered."""
    if wording.messages:
        return {"messages": [{"role": role, "content": content} for role, content in wording.messages]}
    if wording.token_ids:
        return {"prompt": list(wording.token_ids)}
    if api == "chat":
        return {"messages": [{"role": "user", "content": wording.text}]}
    return {"prompt": wording.text}
