"""IP addresses of either version, told from version numbers, times and names in code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from string import hexdigits

from kvaudit.redaction.detectors import Searched, Span
from kvaudit.redaction.hinted import Pattern

_V4_REST = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![A-Za-z0-9_]|\.\d)")
_V4_FIRST = re.compile(r"(?:(?<![A-Za-z0-9_.])|(?<=[Ii][Pp]_)|(?<=host_)|(?<=addr_)|(?<=address_))\d{1,3}")
_V6_INSIDE = re.compile(r":[0-9A-Fa-f]{0,4}:")
_V6_GROUPS = r"(?:[0-9A-Fa-f]{0,4}:){2,7}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{1,4})?(?![A-Za-z0-9_:])"
_V6 = re.compile(rf"(?<![A-Za-z0-9_:.]){_V6_GROUPS}")
_V6_BEHIND_A_NAME = re.compile(_V6_GROUPS)
"""Both are looked for from a character that texts have less of than digits."""
_BEFORE_VERSIONS = re.compile(
    r"(?<![A-Za-z])(?:(?:version|release|revision|build|section|chapter|clause|firmware|driver|ver|rev|sec|v)s?"
    r"[\s:.=#\"'-]{0,4}|§\s?|(?:chrome|chromium|crios|edg[a-z]*|opr|vivaldi|yabrowser|electron)/)$"
    r"|(?:nginx|apache|httpd|python|openssl|openssh|php|ruby|perl|java|jdk|jre|golang|gcc|clang|cuda|kernel|linux|firefox"
    r"|safari)[/-]$|[=~<>!]=\s?$",
    re.IGNORECASE,
)
_LONGEST_BEFORE = 20
_LONGEST_GROUP = 4
_NETMASK_OCTET = 255


def find_addresses(searched: Searched) -> Iterator[Span]:
    """Addresses that say which machine it is: not loopback, not `0.0.0.0`, not a netmask.

    Four numbers with dots are an address unless what stands before them says that they are a version or a section
    (`version 1.2.3.4`, `Chrome/120.0.0.0`, `lib==1.2.3.4`, `v1.2.3.4`). `node/10.0.0.1` and `root@10.0.0.1` are found,
    and so is a version of four numbers that nothing announces.
    """
    yield from _v4(searched.plain)
    yield from _V4_IN_NAME.spans(searched.plain, searched.plain)
    yield from _v6(searched.plain)


def _v4(text: str) -> Iterator[Span]:
    for rest in _V4_REST.finditer(text):
        first = next((found for back in (3, 2, 1) if (found := _first_number(text, rest.start(), back))), None)
        if first is None:
            continue
        start, end = first.start(), rest.end()
        if _is_somebodys(text[start:end]) and not _BEFORE_VERSIONS.search(text, max(0, start - _LONGEST_BEFORE), start):
            yield start, end


def _first_number(text: str, end: int, length: int) -> re.Match[str] | None:
    return _V4_FIRST.fullmatch(text, end - length, end) if end >= length else None


def _v6(text: str) -> Iterator[Span]:
    end = 0
    for inside in _V6_INSIDE.finditer(text):
        if inside.start() < end:
            continue
        start = inside.start()
        while start > end and start > inside.start() - _LONGEST_GROUP and text[start - 1] in hexdigits:
            start -= 1
        if found := _V6.match(text, start) or _behind_a_name(text, start):
            end = found.end()
            if _is_somebodys(found[0]) and _reads_as_address(found[0]):
                yield found.span()


def _behind_a_name(text: str, start: int) -> re.Match[str] | None:
    """An address behind `addr:`, whose colon is none of its own."""
    is_name = text[start] == ":" and text[start + 1] != ":" and text[start - 1 : start].isalpha()
    return _V6_BEHIND_A_NAME.match(text, start + 1) if is_name else None


def _is_somebodys(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return False
    return isinstance(address, IPv6Address) or address.packed[0] not in (0, _NETMASK_OCTET)


_V4_IN_NAME = Pattern(
    ("ip-",),
    re.compile(r"(?<![A-Za-z0-9])ip-(?P<value>\d{1,3}(?:-\d{1,3}){3})(?![\w-])"),
    lambda value: _is_somebodys(value.replace("-", ".")),
)
"""As clouds name their machines."""


def _reads_as_address(text: str) -> bool:
    """`a::b` is a name in C++ and `1:2:3:4:5:6:7:8` a ratio; addresses have a group of three digits or more, and
    short ones begin with four of which one is a number (`fe80::1`).
    """
    groups = [group for group in text.split(":") if group]
    if len(groups) < 3 and "." not in text:
        return len(groups[0]) == 4 and any(character.isdigit() for character in groups[0])
    return any(len(group) > 2 for group in groups)
