"""Tokenizers with offsets, and requests in a mini-language, for the tests of segmenting."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvaudit.records import Request, Segment
from kvaudit.segmenting.applying import Segmented, segment_requests
from kvaudit.segmenting.strategies import parse_strategies
from kvaudit.traces.segments import make_segment

KINDS = {"i": "instruction", "d": "document", "q": "query", "s": "separator", "m": "message", "t": "tool-result"}
ROLES = {"u": "user", "a": "assistant", "y": "system", "t": "tool"}


class Words:
    """A token a word with the space before it, a full stop with line ends behind it, or a sign.

    Offsets leave the space out, as those of byte-level tokenizers may.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = list(re.finditer(r" ?\w+|\.\n+|[^\w]", text))
        ids = [self.ids.setdefault(match[0], len(self.ids)) for match in found]
        return ids, [(match.start() + (len(match[0]) > 1 and match[0][0] == " "), match.end()) for match in found]


class Bytes:
    """A token a byte: those of one character share it."""

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = [(at, character.encode()) for at, character in enumerate(text)]
        return [byte for _, raw in encoded for byte in raw], [(at, at + 1) for at, raw in encoded for _ in raw]


class NoTokenizer:
    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise AssertionError("nothing has to be tokenised")


def segment(written: str) -> Segment:
    """`kind:text`; `kind/role:text` begins a message, such as `q/u:Why?`."""
    head, _, text = written.partition(":")
    kind, _, role = head.partition("/")
    return make_segment(KINDS[kind], text, ROLES[role] if role else None)


def chat(name: str, *segments: str, prelude: Sequence[Sequence[str]] = ()) -> Request:
    before = tuple(tuple(map(segment, prompt)) for prompt in prelude)
    return Request(name, int(name.strip("r")), tuple(map(segment, segments)), before, chat=True)


def plain(name: str, *segments: str, prelude: Sequence[Sequence[str]] = ()) -> Request:
    before = tuple(tuple(map(segment, prompt)) for prompt in prelude)
    return Request(name, int(name.strip("r")), tuple(map(segment, segments)), before)


def told(segments: Sequence[Segment]) -> list[str]:
    """Segments in the mini-language."""
    kinds, roles = ({name: letter for letter, name in names.items()} for names in (KINDS, ROLES))
    return [f"{kinds[part.kind]}{f'/{roles[part.role]}' if part.role else ''}:{part.text}" for part in segments]


def segmented(requests: Sequence[Request], *strategies: str, tokenizer: object = None) -> Segmented:
    return segment_requests(requests, parse_strategies(strategies), tokenizer or NoTokenizer())  # type: ignore[arg-type]


def cut(written: str | Request, *strategies: str, tokenizer: object = None) -> list[str]:
    """The segments of one request, or of a chat of one message."""
    request = written if isinstance(written, Request) else chat("r0", written)
    return told(segmented([request], *strategies, tokenizer=tokenizer).requests[0].segments)
