"""E-mail addresses, phone numbers and payment cards, by the rules of `validators` and `phonenumbers`."""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache

import phonenumbers
import validators

from kvaudit.redaction.detectors import Searched, Span

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits + "".join(map(chr, range(0xC0, 0x250)))
_LOCAL_PART = _LETTERS_AND_DIGITS + "._%+'-"
_LONGEST_LOCAL_PART = 64
_AT = re.compile(r"@|%40")
_LABEL = r"[A-Za-z0-9\u00c0-\u024f](?:[A-Za-z0-9\u00c0-\u024f-]{0,61}[A-Za-z0-9\u00c0-\u024f])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.){{1,8}}(?:[A-Za-z]{{2,24}}|xn--[A-Za-z0-9-]{{2,59}})(?![A-Za-z0-9])")
_PRIVATE_DOMAINS = frozenset({"corp", "example", "home", "internal", "intranet", "invalid", "lan", "local", "test"})
"""Top-level names that no registry has and that private networks and documentation use."""

_PHONE = re.compile(r"[+＋]\(?\d(?:[ \t\u00a0().\-/]{0,3}\d){6,}")
_DIGITS = re.compile(r"\d+")
_LONGEST_PHONE = 48
_SIGNED_FLOAT = re.compile(r"\+\d+\.\d+(?:\s.*)?", re.DOTALL)

_CARD = re.compile(
    r"[2-6](?<![A-Za-z0-9_.-].)"
    r"(?:\d{13,15}|(?<!\d{4} .)(?:\d{3}([ -])\d{4}\1\d{4}\1\d{4}|\d{3}([ -])\d{6}\2\d{4,5})(?! \d{4}(?!\d)))"
    r"(?![A-Za-z0-9_-]|\.\d)"
)
"""What stands before and behind keeps out decimals, UUIDs and columns of numbers with four digits."""
_NETWORKS: tuple[Callable[[str], object], ...] = (
    validators.visa,
    validators.mastercard,
    validators.amex,
    validators.discover,
    validators.diners,
    validators.jcb,
    validators.unionpay,
    validators.mir,
)


def find_emails(searched: Searched) -> Iterator[Span]:
    """Addresses under a top-level domain that exists, or that private networks use: `logo@2x.png` is none."""
    text = searched.plain
    for at in _AT.finditer(text) if "@" in text or "%40" in text else ():
        before = text[max(0, at.start() - _LONGEST_LOCAL_PART) : at.start()]
        local_part = before[len(before.rstrip(_LOCAL_PART)) :].lstrip(".%+'-")
        domain = _DOMAIN.match(text, at.end())
        if local_part and domain and (length := _length_of_real(domain[0])):
            yield at.start() - len(local_part), at.end() + length


def _length_of_real(domain: str) -> int:
    """Characters of the longest domain under a known top-level name that this one begins with."""
    while "." in domain:
        shorter, _, top = domain.rpartition(".")
        if _is_top_level(top.lower()):
            return len(domain)
        domain = shorter
    return 0


@lru_cache(4096)
def _is_top_level(name: str) -> bool:
    return name in _PRIVATE_DOMAINS or validators.domain(f"a.{name}", consider_tld=True) is True


def find_phones(searched: Searched) -> Iterator[Span]:
    """International numbers, which begin with `+` and a country code and are valid there.

    Without one, a number cannot be told from a price, a volume or an id.
    """
    text = searched.plain
    if "+" not in text and "＋" not in text:
        return
    for match in _PHONE.finditer(text):
        if end := _end_of_phone(text, match):
            yield match.start(), end


def _end_of_phone(text: str, match: re.Match[str]) -> int | None:
    """The longest number that begins here, with its extension; other numbers may follow it."""
    start = match.start()
    window = text[start : start + _LONGEST_PHONE]
    found = next(iter(phonenumbers.PhoneNumberMatcher(window, None, max_tries=sys.maxsize)), None)
    if found and found.start == 0:
        return None if _SIGNED_FLOAT.fullmatch(found.raw_string) else start + found.end
    ends = [group.end() for group in _DIGITS.finditer(window, 0, match.end() - start)]
    return next((start + end for end in reversed(ends) if _is_phone(window[:end])), None)


def _is_phone(text: str) -> bool:
    try:
        return not _SIGNED_FLOAT.fullmatch(text) and phonenumbers.is_valid_number(phonenumbers.parse(text))
    except phonenumbers.NumberParseException:
        return False


def find_cards(searched: Searched) -> Iterator[Span]:
    """Numbers of a card network with a right check digit, plain or in the groups that are printed on cards."""
    for match in _CARD.finditer(searched.plain):
        digits = match[0].replace(" ", "").replace("-", "")
        # each network's rule checks the digit too, and all of them together take long
        if validators.card_number(digits) and any(is_of(digits) for is_of in _NETWORKS):
            yield match.span()
