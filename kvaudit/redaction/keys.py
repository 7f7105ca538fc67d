"""Keys, tokens, passwords and private keys: the rules of Kingfisher, and patterns for what it leaves to context.

Kingfisher brings rules for some hundred services, with entropy thresholds and check sums, and scans offline. Its rules
for credentials that no prefix marks ask for more than a text of a trace gives, hence the patterns here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kingfisher_sdk import Rules, Scanner

from kvaudit.redaction.detectors import Searched, Span

_NOT_ASCII = re.compile(r"[^\x01-\x7f]+")
_ENDS_A_KEY = str.maketrans(dict.fromkeys(",&()[]{}<>|", " "))
_VARIABLES = tuple("$<{%*[")
"""What begins a name that stands for a password in documentation and configuration."""


@dataclass(frozen=True, slots=True)
class _Pattern:
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


def _always(value: str) -> bool:
    return True


def _digits(fewest: int) -> Callable[[str], bool]:
    return lambda value: sum(character.isdigit() for character in value) >= fewest


def _is_no_variable(value: str) -> bool:
    return not value.startswith(_VARIABLES)


def _is_mixed(value: str) -> bool:
    """Letters and digits, and no name of a variable."""
    has_letter = any(character.isalpha() for character in value)
    return has_letter and any(character.isdigit() for character in value) and _is_no_variable(value)


_BEFORE_KEY = ("api", "access", "auth", "secret", "private", "account", "client", "encryption", "master", "signing")
_KEY = "(?:" + "|".join(f"(?<={word})|(?<={word}[_-])" for word in _BEFORE_KEY) + ")key"
_SET_TO = r"[\s\"'`]{0,4}(?::=|=>|[:=])[\s\"'`]{0,4}"
_ENDS = r"(?![\w.(\[/+~-])"

_PATTERNS = (
    _Pattern(
        ("akia", "asia", "abia", "acca"),
        re.compile(r"(?<![A-Za-z0-9])(?P<value>(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16})(?![A-Za-z0-9])"),
        _always,
    ),
    _Pattern(
        ("bearer", "basic"),
        re.compile(r"(?i)(?<!\w)(?:bearer|basic)\s{1,4}(?P<value>[\w.~+/-]{16,4096}={0,2})"),
        _digits(1),
    ),
    _Pattern(
        ("://",),
        re.compile(r"://[^\s/?#:@\"'<>]{0,256}:(?P<value>[^\s/?#@\"'<>]{1,256})@"),
        _is_no_variable,
    ),
    _Pattern(("sk-", "pk-"), re.compile(r"(?<![\w-])(?P<value>[sp]k-[\w-]{20,512})"), _digits(2)),
    _Pattern(
        ("sk_live_", "sk_test_", "rk_live_", "rk_test_"),
        re.compile(r"(?<![A-Za-z0-9])(?P<value>[sr]k_(?:live|test)_\w{16,256})"),
        _always,
    ),
    _Pattern((":aa",), re.compile(r"(?<=\d{8}):(?P<value>AA[\w-]{33})(?![\w-])"), _always),
    _Pattern(("accountkey=",), re.compile(r"AccountKey=(?P<value>[A-Za-z0-9+/]{86}==)"), _always),
    _Pattern(
        ("-----begin ",),
        re.compile(
            r"(?P<value>-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:\s{1,8}(?:[A-Za-z-]{1,20}: [^\s]{1,80}|[A-Za-z0-9+/=]{24,128})){0,2048})"
        ),
        _always,
    ),
    _Pattern(
        ("password", "passwd", "passphrase", "pwd"),
        re.compile(rf"(?i)\w{{3,10}}?{_SET_TO}(?P<value>[^\s\"'`,;<>(){{}}\[\]]{{8,256}}+)(?![(\[])"),
        _is_mixed,
    ),
    _Pattern(
        ("key", "secret", "token"),
        re.compile(rf"(?i)(?:{_KEY}|secret|token){_SET_TO}(?P<value>[A-Za-z0-9+/_=~-]{{16,512}}+){_ENDS}"),
        _is_mixed,
    ),
)


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
