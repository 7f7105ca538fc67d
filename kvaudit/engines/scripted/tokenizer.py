"""Token ids are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

BOS = 256
VOCABULARY = BOS + 1


class ByteTokenizer:
    """Token ids are UTF-8 bytes, after a begin token."""

    digest = sha256(b"utf-8 bytes, 256 begins").hexdigest()
    leading_ids = (BOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token != BOS).decode(errors="replace")

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces: list[tuple[int | None, str]] = []
        for index, (role, content) in enumerate(messages):
            pieces += [(None, f"<{role}>"), (index, content)]
        return [*pieces, (None, "<assistant>")]
