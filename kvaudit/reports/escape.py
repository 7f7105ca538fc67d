"""Foreign text made visible: control characters, terminal escapes and invisible marks as backslash escapes."""

from __future__ import annotations

import unicodedata

HARMFUL = frozenset({"Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn"})
"""Unicode categories that a terminal obeys or does not show: control, format, line and paragraph separators,
surrogates, private use, unassigned."""
EXCERPT = 160
BEFORE_DIFFERENCE = 40


def visible(text: str) -> str:
    """The text on one line, with every character of a harmful category, and every space but ' ', escaped."""
    # The same rule at the speed of C: `isprintable` is false for just these characters.
    if text.isprintable():
        return text
    return "".join(character if _is_plain(character) else _escaped(character) for character in text)


def excerpt(text: str, around: int = 0, length: int = EXCERPT) -> str:
    """At most `length` characters of a text from a little before `around`, visible, with how much was left out."""
    start = max(0, around - BEFORE_DIFFERENCE) if len(text) > length else 0
    piece = text[start : start + length]
    head = "..." if start else ""
    left_out = f"... ({len(text):,} characters)" if start + length < len(text) or start else ""
    return f"{head}{visible(piece)}{left_out}" if text else "(empty)"


def first_difference(left: str, right: str) -> int:
    """Index of the first character in which two texts differ; the shorter one's length when it begins the other."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_plain(character: str) -> bool:
    category = unicodedata.category(character)
    return character == " " or (category not in HARMFUL and category != "Zs")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
