"""Keys, tokens, passwords and private keys: the rules of Kingfisher, and patterns for what it leaves to context.

Kingfisher brings rules for some hundred services, with entropy thresholds and check sums, and scans offline. Its rules
for credentials that no prefix marks ask for more than a text of a trace gives, hence the patterns of `key_forms` and
`key_contexts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kingfisher_sdk import Rules, Scanner

from kvaudit.redaction.detectors import Searched, Span
from kvaudit.redaction.key_contexts import CONTEXTS
from kvaudit.redaction.key_forms import FORMS, discord_tokens

_NOT_ASCII = re.compile(r"[^\x01-\x7f]+")
_ENDS_A_KEY = str.maketrans(dict.fromkeys(",&()[]{}<>|", " "))
_PATTERNS = (*FORMS, *CONTEXTS)

_END = "-----end "
_PRIVATE_KEY_ENDS = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_REST_OF_PRIVATE_KEY = re.compile(
    r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]{16,128}\s{1,8})+(?:[A-Za-z0-9+/=]{1,76}\s{1,8})?$"
)
_LONGEST_REST = 1 << 14


class KeyFinder:
    """Kingfisher's rules take seconds to compile: `cache_folder` is where they are kept, None for nowhere."""

    def __init__(self, cache_folder: Path | None) -> None:
        self._scanner = _scanner(cache_folder)

    def __call__(self, searched: Searched) -> Iterator[Span]:
        text = searched.plain
        if not text.isascii() or "\0" in text:  # blanks keep the offsets, and end a key as a space does
            text = _NOT_ASCII.sub(lambda match: " " * len(match[0]), text)
        for finding in self._scanner.scan(_with_plain_ends(text)):
            if finding.visible:
                yield finding.location["start_offset"], finding.location["end_offset"]
        lower = text.lower()
        for pattern in _PATTERNS:
            yield from pattern.spans(text, lower)
        yield from discord_tokens(text)
        yield from _rests_of_private_keys(text, lower)


@cache
def _scanner(cache_folder: Path | None) -> Scanner:
    """The same for every text and finder: it keeps nothing of what it scans."""
    return Scanner(Rules(cache=cache_folder is not None, cache_dir=cache_folder))


def _rests_of_private_keys(text: str, lower: str) -> Iterator[Span]:
    """What is left of private keys whose beginning stands elsewhere."""
    done = 0
    position = lower.find(_END)
    while position >= 0:
        if ends := _PRIVATE_KEY_ENDS.match(text, position):
            if rest := _REST_OF_PRIVATE_KEY.search(text, max(done, position - _LONGEST_REST), position):
                yield rest.start(), ends.end()
            done = ends.end()
        position = lower.find(_END, position + 1)


def _with_plain_ends(text: str) -> str:
    """Many rules want a blank or a quote behind a key: blanks in place of what no key holds, and of full stops."""
    text = f"{text.translate(_ENDS_A_KEY)} ".replace(". ", "  ").replace(".\n", " \n").replace(".\r", " \r")
    return text[:-1]
