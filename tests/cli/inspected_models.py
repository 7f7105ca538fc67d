"""A tokenizer with a chat template for the command line's tests: one token a byte."""

from __future__ import annotations

from collections.abc import Sequence


class ByteModel:
    digest = "bytes"
    leading_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        raise AssertionError("nothing is decoded")

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces = [
            piece
            for index, (role, content) in enumerate(messages)
            for piece in ((None, f"<{role}>"), (index, content), (None, "\n"))
        ]
        return [(index, text) for index, text in [*pieces, (None, "<assistant>")] if text]

    def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
        rendered = "".join(f"<{role}>{content or ''}\n" for role, content in messages)
        return rendered + ("<assistant>" if generation_prompt else "")
