"""Traces in a mini-language, and tokenizers to inspect them with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvaudit.preflight.inspection import Inspection, Reading, inspect
from kvaudit.preflight.reuse import Caches, RequestReuse
from kvaudit.records import Request, Segment
from kvaudit.traces.segments import make_segment

KINDS = {"i": "instruction", "d": "document", "q": "query", "s": "separator", "m": "message", "t": "tool-result"}
UNLIMITED = Caches(None)


class Characters:
    """One token a character, save `th` and `an`, which are one each."""

    digest = "characters"
    merged = ("th", "an")

    def __init__(self, leading_ids: tuple[int, ...] = ()) -> None:
        self.leading_ids = leading_ids

    def encode(self, text: str) -> list[int]:
        ids, position = [], 0
        while position < len(text):
            pair = text[position : position + 2]
            ids.append(2_000_000 + self.merged.index(pair) if pair in self.merged else ord(text[position]))
            position += 2 if pair in self.merged else 1
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        raise AssertionError("nothing is decoded")

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces: list[tuple[int | None, str]] = []
        for index, (role, content) in enumerate(messages):
            pieces += [(None, f"<{role}>"), (index, content), (None, "\n")]
        return [(index, text) for index, text in [*pieces, (None, "<assistant>")] if text]

    def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
        rendered = "".join(f"<{role}>{content or ''}\n" for role, content in messages)
        return rendered + ("<assistant>" if generation_prompt else "")


def segment(written: str) -> Segment:
    """`d:text` is a document; `u`, `a` and `y` are messages of user, assistant and system."""
    kind, _, text = written.partition(":")
    roles = {"u": "user", "a": "assistant", "y": "system"}
    return make_segment("message", text, roles[kind]) if kind in roles else make_segment(KINDS[kind], text)


def request(name: str, *segments: str, prelude: Sequence[Sequence[str]] = (), **fields: object) -> Request:
    before = tuple(tuple(map(segment, prompt)) for prompt in prelude)
    return Request(name, int(name.strip("r")), tuple(map(segment, segments)), before, **fields)  # type: ignore[arg-type]


def chat(name: str, *messages: str, **fields: object) -> Request:
    return request(name, *messages, chat=True, **fields)


def inspected(
    requests: Iterable[Request], tokenizer: Characters | None = None, context_tokens: int | None = None
) -> Inspection:
    tokenizer = tokenizer or Characters()
    return inspect(requests, Reading(tokenizer, tokenizer, context_tokens), UNLIMITED)


def rows(
    requests: Iterable[Request], caches: Caches = UNLIMITED, tokenizer: Characters | None = None
) -> list[RequestReuse]:
    found: list[RequestReuse] = []
    inspect(requests, Reading(tokenizer or Characters()), caches, found.append)
    return found
