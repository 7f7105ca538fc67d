"""Keys that their form gives away wherever they stand, where Kingfisher's rules ask for more than the key."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvaudit.redaction.detectors import Span
from kvaudit.redaction.hinted import Pattern, always, is_mixed_at_random

_DISCORD_REST = re.compile(r"\.[\w-]{6}\.[\w-]{27,40}(?![\w-]|\.\w)", re.ASCII)
_DISCORD_ID = re.compile(r"(?<![\w-])[MNO][A-Za-z0-9]{22,27}", re.ASCII)
_LONGEST_DISCORD_ID = 29


def _form(hint: str | tuple[str, ...], value: str) -> Pattern:
    """A key that stands alone and begins with its hint."""
    hints = (hint,) if isinstance(hint, str) else hint
    return Pattern(hints, re.compile(rf"(?<![A-Za-z0-9_-])(?P<value>{value})(?![A-Za-z0-9_-])"), is_mixed_at_random)


FORMS = (
    Pattern(
        ("akia", "asia", "abia", "acca"),
        re.compile(r"(?<![A-Za-z0-9])(?P<value>(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16})(?![A-Za-z0-9])"),
        always,
    ),
    Pattern(
        ("sk-", "pk-"), re.compile(r"(?<![\w-])(?P<value>[sp]k-(?=[\w-]*\d[\w-]*\d)[\w-]{20,512})"), is_mixed_at_random
    ),
    Pattern(
        ("sk_", "rk_"),
        re.compile(r"(?<![A-Za-z0-9])(?P<value>[sr]k_(?:live|test)_\w{16,256}|sk_[0-9a-f]{48}(?!\w))"),
        always,
    ),
    _form("gocspx-", r"GOCSPX-[\w-]{24,40}"),
    Pattern(("ya29.",), re.compile(r"(?<![\w.-])(?P<value>ya29\.[\w-]{20,2048})"), always),
    _form("whsec_", r"whsec_[A-Za-z0-9+/]{24,128}={0,2}"),
    _form("lsv2_", r"lsv2_[ps][kt]_[0-9a-f]{32}_[0-9a-f]{8,12}"),
    _form("hrku-", r"HRKU-(?:[\w-]{30,80})"),
    _form("fw_", r"fw_[A-Za-z0-9]{20,40}"),
    _form("nrak-", r"NRAK-[A-Z0-9]{24,32}"),
    _form("tvly-", r"tvly-(?:[a-z]{2,8}-)?[A-Za-z0-9-]{20,64}"),
    _form(("secret_", "ntn_"), r"(?:secret_[A-Za-z0-9]{43}|ntn_[A-Za-z0-9]{40,60})"),
    _form("jina_", r"jina_[A-Za-z0-9_-]{40,80}"),
    _form("sb_secret_", r"sb_secret_[\w-]{20,64}"),
    _form("e2b_", r"e2b_[0-9a-f]{40}"),
    Pattern(("sk.eyj",), re.compile(r"(?<![\w.-])(?P<value>sk\.eyJ[\w-]{20,512}\.[\w-]{16,64})"), always),
    Pattern(
        ("sig=",),
        re.compile(r"(?i)(?<![A-Za-z0-9_])sig=(?P<value>(?:[A-Za-z0-9+/]|%2B|%2F){43}(?:=|%3D))"),
        always,
    ),
    Pattern((":aa",), re.compile(r"(?<=\d{8}):(?P<value>AA[\w-]{33})(?![\w-])"), always),
    Pattern(("accountkey=",), re.compile(r"AccountKey=(?P<value>[A-Za-z0-9+/]{86}==)"), always),
    Pattern(
        ("key-", "token-", "session-"),
        re.compile(r"(?i)(?<!cache[_-])(?P<value>(?:key|token|session)-[0-9a-f]{32,128})(?![A-Za-z0-9_-])"),
        is_mixed_at_random,
    ),
    Pattern(
        ("-----begin ",),
        re.compile(
            r"(?P<value>-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:\s{1,8}(?:[A-Za-z-]{1,20}: [^\s]{1,80}|[A-Za-z0-9+/=]{24,128})){0,2048})"
        ),
        always,
    ),
    Pattern(
        ("private-lines:",),
        re.compile(
            r"Private-Lines: \d{1,4}\s{1,8}(?P<value>[A-Za-z0-9+/=]{16,128}(?:\s{1,8}[A-Za-z0-9+/=]{16,128}){0,512}"
            r"(?:\s{1,8}[A-Za-z0-9+/]{1,64}={1,2})?)"
        ),
        always,
    ),
)


def discord_tokens(text: str) -> Iterator[Span]:
    """Bots' tokens: an id in base64, a time and a signature, with full stops between them and no prefix."""
    for rest in _DISCORD_REST.finditer(text):
        before = max(0, rest.start() - _LONGEST_DISCORD_ID)
        for own_id in _DISCORD_ID.finditer(text, before, rest.start()):
            if own_id.end() == rest.start():
                yield own_id.start(), rest.end()
