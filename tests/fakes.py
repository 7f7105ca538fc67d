"""Fakes and builders that several test modules share."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from kvaudit.records import Request, Segment, Trace


def segment(kind: str, text: str, **fields: object) -> Segment:
    return Segment(kind, sha256(text.encode()).hexdigest()[:16], text, **fields)


def rolling_trace(requests: int, window: int = 4, *, prelude: bool = False, max_tokens: int = 8) -> Trace:
    """A rolling window over documents d0, d1, ...: each request drops the oldest and appends a new one."""

    def prompt(first: int) -> tuple[Segment, ...]:
        parts = [segment("instruction", "Answer from the documents.")]
        for number in range(first, first + window):
            parts += [segment("separator", " # # "), segment("document", f"document {number} says {number * 7919}.")]
        return *parts, segment("separator", " # # ")

    built = tuple(
        Request(
            request_id=f"r{ordinal}",
            ordinal=ordinal,
            segments=(*prompt(ordinal), segment("query", f"What does document {ordinal} say?")),
            prelude=(prompt(ordinal - 1),) if prelude and ordinal else (),
            max_tokens=max_tokens,
        )
        for ordinal in range(requests)
    )
    return Trace(built, sha256(repr(built).encode()).hexdigest(), "rolling.jsonl")


class WordTokenizer:
    """One id a word, numbered as they come; an unknown id raises."""

    digest = "words"

    def __init__(self, leading_ids: tuple[int, ...] = ()) -> None:
        self.leading_ids = leading_ids
        self.words: list[str] = ["<s>", "</s>"]
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in token_ids)

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces: list[tuple[int | None, str]] = []
        for index, (role, content) in enumerate(messages):
            pieces += [(None, f"<{role}>"), (index, content.strip()), (None, "")]
        return [*pieces, (None, "<assistant>")]
