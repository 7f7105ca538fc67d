"""E-mail addresses, phone numbers and payment cards, by the rules of `validators` and `phonenumbers`."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from functools import lru_cache

import phonenumbers
import validators
from phonenumbers.phonemetadata import PhoneMetadata

from kvaudit.redaction.detectors import Searched, Span
from kvaudit.redaction.hinted import Pattern

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits + "".join(map(chr, range(0xC0, 0x250)))
_LOCAL_PART = _LETTERS_AND_DIGITS + "._%+'-"
_LONGEST_LOCAL_PART = 64
_LONGEST_LABEL = 64
_WIDE_LOCAL_PART = re.compile(r"[\w.%+-]+\Z")
_QUOTED_LOCAL_PART = re.compile(r'"[^"\n<>=:,]{1,62}"\Z')
_AT = re.compile(r"[@＠]|%40")
_LABEL = r"[A-Za-z0-9\u00c0-\u024f](?:[A-Za-z0-9\u00c0-\u024f-]{0,61}[A-Za-z0-9\u00c0-\u024f])?"
_DOMAIN = re.compile(rf"(?:{_LABEL}\.){{1,8}}(?:[A-Za-z]{{2,24}}|xn--[A-Za-z0-9-]{{2,59}})(?![A-Za-z0-9])")
_WIDE_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}")
_NO_ADDRESS = re.compile(r"git@.*|.*@(?:latest|next|beta|canary)\.[a-z]+|[a-z]@[a-z]\.(?:py|rs|md|sh|pl|cc|ml)", re.I)
"""Where a repository is cloned from, a package with its tag, a product of matrices."""
_PRIVATE_DOMAINS = frozenset({"corp", "example", "home", "internal", "intranet", "invalid", "lan", "local", "test"})
"""Top-level names that no registry has and that private networks and documentation use."""

_BETWEEN_DIGITS = r"[ \t().\-/\u00a0\u2007\u2009-\u2015\u202f\u2212]"
_PHONE = re.compile(rf"(?:[+＋]|%2B)\(?\d(?:{_BETWEEN_DIGITS}{{0,3}}\d){{6,}}", re.IGNORECASE)
_DIGITS = re.compile(r"\d+")
_EXTENSION = re.compile(r"(?:;ext=|[ ,]{0,2}(?:ext\.?|extension|x)[ :]?\s?)\d{1,7}(?!\d)", re.IGNORECASE)
_TRUNK_ZERO = "(0)"
_LONGEST_PHONE = 48
_LONGEST_COUNTRY_CODE = 3
_SIGNED_FLOAT = re.compile(r"\+\d+\.\d+(?:\s.*)?", re.DOTALL)

_BETWEEN_GROUPS = r"[ .\u00a0\u202f\u2010-\u2013-]|  "
_CARD = re.compile(
    r"[2-6](?<![A-Za-z0-9.-].)"
    r"(?:\d{13,15}|\d{18}|"
    rf"(?<!\d{{4}} .)(?:\d{{3}}({_BETWEEN_GROUPS})\d{{4}}\1\d{{4}}\1\d{{4}}(?:\1\d{{3}})?"
    r"|\d{3}(?:[ \u00a0-]\d{4}){3}"
    rf"|\d{{3}}({_BETWEEN_GROUPS})\d{{6}}\2\d{{4,5}})(?! \d{{4}}(?!\d)))"
    r"(?![A-Za-z0-9_-]|\.\d)"
)
"""What stands before and behind keeps out decimals, UUIDs and columns of numbers with four digits."""
_NOT_DIGITS = re.compile(r"\D")
_LONGEST_CARD = 19
_LONG_CARDS = ("4", "62", "6011", "64", "65")
"""What numbers of nineteen digits begin with, which `validators` knows not of."""
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
    for at in _AT.finditer(text) if "@" in text or "%40" in text or "＠" in text else ():
        end = _end_of_domain(text, at.end())
        if end is None:
            continue
        start = at.start() - _length_of_local_part(text[max(0, at.start() - _LONGEST_LOCAL_PART) : at.start()])
        if start < at.start() and not _NO_ADDRESS.fullmatch(text, start, end):
            yield start, end


def _length_of_local_part(before: str) -> int:
    """Of Latin letters where one stands before the sign, as prose of other scripts goes on without a blank."""
    if latin := before[len(before.rstrip(_LOCAL_PART)) :].lstrip(".%+'-"):
        return len(latin)
    wide = _WIDE_LOCAL_PART.search(before) or _QUOTED_LOCAL_PART.search(before)
    return len(wide[0].lstrip(".%+-")) if wide else 0


def _end_of_domain(text: str, start: int) -> int | None:
    if domain := _DOMAIN.match(text, start):
        length = _length_of_real(domain[0])
    else:
        wide = None if text[start : start + _LONGEST_LABEL].isascii() else _WIDE_DOMAIN.match(text, start)
        length = _length_of_real(wide[0]) if wide else 0
    return start + length if length else None


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
    try:
        ascii_name = name.encode("idna").decode()
    except UnicodeError:
        return False
    return name in _PRIVATE_DOMAINS or validators.domain(f"a.{ascii_name}", consider_tld=True) is True


def find_phones(searched: Searched) -> Iterator[Span]:
    """International numbers, which begin with `+` and a country code and are valid there; without `+` in links only.

    Elsewhere, one without it cannot be told from a price, a volume or an id.
    """
    text = searched.plain
    if "+" in text or "＋" in text or "%2" in text:
        for match in _PHONE.finditer(text):
            sign = len(match[0]) - len(match[0].lstrip("+＋")) or len("%2B")
            behind = match.start() + sign
            if length := _length_of_phone(text[behind : behind + _LONGEST_PHONE].translate(_AS_ASCII)):
                yield match.start(), behind + length
    yield from _LINK_TO_PHONE.spans(text, text)


_AS_ASCII = {ord(sign): " " for sign in "\u00a0\u2007\u2009\u200a\u200b\u202f"} | {
    ord(sign): "-" for sign in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
}


@lru_cache(1 << 12)
def _length_of_phone(behind_sign: str) -> int:
    """Characters of the longest number that stands here behind its `+`, with its extension."""
    seen = _PHONE.match(f"+{behind_sign}")
    ends = [group.end() for group in _DIGITS.finditer(behind_sign, 0, seen.end() - 1)] if seen else []
    for end in reversed(ends):
        if _is_phone(behind_sign[:end]) and not _SIGNED_FLOAT.fullmatch(f"+{behind_sign[:end]}"):
            extension = _EXTENSION.match(behind_sign, end)
            return extension.end() if extension else end
    return 0


def _is_phone(text: str) -> bool:
    """Over digits behind a `+`: by its country's code and lengths first, which is many times faster than the rest."""
    digits = _NOT_DIGITS.sub("", text.replace(_TRUNK_ZERO, ""))
    if not _is_possible(digits[:_LONGEST_COUNTRY_CODE], len(digits)):
        return False
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(f"+{text}"))
    except phonenumbers.NumberParseException:
        return False


_LINK_TO_PHONE = Pattern(("wa.me/", "phone="), re.compile(r"(?:wa\.me/|phone=)(?P<value>\d{8,15})(?!\d)"), _is_phone)


@lru_cache(1 << 14)
def _is_possible(first: str, digits: int) -> bool:
    """Is there a country whose code stands first and that has numbers of so many digits, one more for a trunk's?"""
    for length in range(1, _LONGEST_COUNTRY_CODE + 1):
        if regions := phonenumbers.COUNTRY_CODE_TO_REGION_CODE.get(int(first[:length])):
            metadata = PhoneMetadata.metadata_for_region_or_calling_code(int(first[:length]), regions[0])
            described = metadata.general_desc if metadata else None
            lengths = described.possible_length if described else ()
            return bool({digits - length, digits - length - 1} & set(lengths))
    return False


def find_cards(searched: Searched) -> Iterator[Span]:
    """Numbers of a card network with a right check digit, plain or in the groups that are printed on cards."""
    for match in _CARD.finditer(searched.plain):
        digits = _NOT_DIGITS.sub("", match[0])
        # each network's rule checks the digit too, and all of them together take long
        if validators.card_number(digits) and _is_of_a_network(digits):
            yield match.span()


def _is_of_a_network(digits: str) -> bool:
    if len(digits) == _LONGEST_CARD:
        return digits.startswith(_LONG_CARDS)
    return any(is_of(digits) for is_of in _NETWORKS)
