"""Patterns that are tried only where a hint of theirs stands, and what tells a random value from words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvaudit.redaction.detectors import Span

_VARIABLES = tuple("$<{%*[")
"""What begins a name that stands for a password in documentation and configuration."""
_OBJECTS = (
    "self",
    "cls",
    "this",
    "os",
    "process",
    "config",
    "conf",
    "cfg",
    "settings",
    "args",
    "opts",
    "options",
    "env",
)
_ATTRIBUTE = re.compile(rf"(?:{'|'.join(_OBJECTS)})(?:\.[A-Za-z_]\w*)+")
_PARTS = re.compile(r"[A-Za-z0-9]+")
_WORD = re.compile(r"(?=.*[aeiouyAEIOUY])(?:[A-Z]?[a-z]{2,19}|[A-Z]{3,20})")
_LONGEST_OTHER_PART = 6
_SHORTEST_OF_LETTERS = 20
_CONSONANTS = re.compile(r"[bcdfghjklmnpqrstvwxz]{6}", re.IGNORECASE)
_CHANGES_OF_CASE = re.compile(r"(?<=[a-z])[A-Z]|(?<=[A-Z])[a-z]")
_SHARE_OF_CHANGES = 0.3


@dataclass(frozen=True, slots=True)
class Pattern:
    """Every match begins with one of `hints`, in any case, though its group `value` may not; `holds` decides over it.

    Texts are searched for hints first, which is many times faster than a pattern that may begin anywhere.
    """

    hints: tuple[str, ...]
    pattern: re.Pattern[str]
    holds: Callable[[str], bool]

    def spans(self, text: str, lower: str) -> Iterator[Span]:
        for hint in self.hints:
            position = lower.find(hint)
            while position >= 0:
                match = self.pattern.match(text, position)
                if match and self.holds(match["value"]):
                    yield match.span("value")
                position = lower.find(hint, position + 1)


def always(value: str) -> bool:
    return True


def is_no_variable(value: str) -> bool:
    return not value.startswith(_VARIABLES)


def is_password(value: str) -> bool:
    """Letters and digits, and no name of a variable."""
    return _is_mixed(value) and is_no_variable(value) and not _ATTRIBUTE.fullmatch(value)


def is_secret(value: str) -> bool:
    """Letters and digits that are no words with numbers behind them, or letters that look drawn."""
    return is_no_variable(value) and (is_mixed_at_random(value) or are_letters_at_random(value))


def is_mixed_at_random(value: str) -> bool:
    return _is_mixed(value) and not reads_as_words(value)


def are_letters_at_random(value: str) -> bool:
    """Twenty letters or more in which the case changes all the time, or with many consonants in a row."""
    if len(value) < _SHORTEST_OF_LETTERS or not value.isalpha():
        return False
    changes = sum(1 for _ in _CHANGES_OF_CASE.finditer(value))
    return changes >= _SHARE_OF_CHANGES * len(value) or _CONSONANTS.search(value) is not None


def reads_as_words(value: str) -> bool:
    """`cl100k_base_tokenizer_v2`: half of it or more are words between signs, and all other parts are short."""
    parts = _PARTS.findall(value)
    words = [bool(_WORD.fullmatch(part)) for part in parts]
    if len(parts) < 2 or any(
        len(part) > _LONGEST_OTHER_PART for part, word in zip(parts, words, strict=True) if not word
    ):
        return False
    letters = sum(len(part) for part, word in zip(parts, words, strict=True) if word)
    return 2 * letters >= sum(map(len, parts))


def _is_mixed(value: str) -> bool:
    return any(character.isalpha() for character in value) and any(character.isdigit() for character in value)
