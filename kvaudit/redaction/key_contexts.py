"""Keys and passwords that what stands before them gives away: names, options, tags, headers, URLs, sentences."""

from __future__ import annotations

import re

from kvaudit.redaction.hinted import Pattern, is_no_variable, is_password, is_secret

_BEFORE_KEY = ("api", "access", "auth", "secret", "private", "account", "client", "encryption", "master", "signing")
_KEY = "(?:" + "|".join(f"(?<={word})|(?<={word}[ _-])" for word in _BEFORE_KEY) + ")key"
_WHICH = r"s?(?:[_-][A-Za-z0-9]{1,16}){0,2}(?:\[[\"']?\w{1,32}[\"']?\])?"
"""Which of several it is: `api_key_1`, `access_token_prod`, `API_KEY['prod']`."""
_QUOTES = r"(?:[ ]{1,24}[\"'`]|[\s\"'`]{0,4})"
"""Backslashes of JSON in JSON are blanks by now, and may be many."""
_SET_TO = rf"(?:{_QUOTES}(?::=|=>|[:=]){_QUOTES}|\s{{1,2}}(?:is|was)(?::|\s)\s?[\"'`]?)"
_IN_A_TAG = r"(?:(?<=\w)>\s{0,4}(?=[^\s<>]{8,4096}\s{0,4}</))"
_SECRET = r"[A-Za-z0-9+/_=~-][A-Za-z0-9+/_=~.-]{14,510}[A-Za-z0-9+/_=~-]"
_ENDS = r"(?![\w(\[/+~=-]|\.\w)"
_PASSWORD = r"[^\s\"'`,;<>(){}\[\]]{8,256}+"
_PAIR = r"[\w.-]{1,64}=[^\s;,\"'`<>\[\]{}]"

_SHORTEST_SESSION = 8


def _holds_a_session(cookies: str) -> bool:
    values = (pair.partition("=")[2] for pair in cookies.split(";"))
    return any(len(value) >= _SHORTEST_SESSION and is_password(value) for value in values)


CONTEXTS = (
    Pattern(
        ("bearer", "basic"),
        re.compile(r"(?i)(?<!\w)(?:bearer|basic)\s{1,4}(?P<value>[\w.~+/-]{16,4096}={0,2})"),
        is_secret,
    ),
    Pattern(
        ("authorization",),
        re.compile(
            rf"(?i)authorization{_SET_TO}(?:[A-Za-z-]{{1,20}}\s{{1,4}})?(?P<value>[\w.~+/-]{{16,4096}}={{0,2}})"
        ),
        is_secret,
    ),
    Pattern(
        ("cookie",),
        re.compile(
            rf"(?i)cookies?{_SET_TO}(?P<value>{_PAIR}{{1,4096}}(?:;[ ]?(?:{_PAIR}{{0,4096}}|[\w-]{{1,20}})){{0,64}})"
        ),
        _holds_a_session,
    ),
    Pattern(
        ("://",),
        re.compile(r"://[^\s/?#:@\"'<>]{0,256}:(?P<value>[^\s/?#\"'<>]{1,256})@(?=[\w.\[$<{-])"),
        is_no_variable,
    ),
    Pattern(
        ("password", "passwd", "passphrase", "pwd"),
        re.compile(rf"(?i)\w{{3,10}}?{_WHICH}(?:{_SET_TO}|{_IN_A_TAG})(?P<value>{_PASSWORD})(?![(\[])"),
        is_password,
    ),
    Pattern(
        ("key", "secret", "token"),
        re.compile(rf"(?i)(?:{_KEY}|secret|token){_WHICH}(?:{_SET_TO}|{_IN_A_TAG})(?P<value>{_SECRET}){_ENDS}"),
        is_secret,
    ),
    Pattern(
        ("--",),
        re.compile(
            r"(?i)(?<![\w-])--(?=\w)(?:[a-z]{1,16}-){0,3}(?:key|apikey|token|secret|password|passwd|passphrase)"
            rf"[ \t]{{1,4}}[\"']?(?P<value>{_PASSWORD})"
        ),
        is_password,
    ),
    Pattern(
        ("sshpass",), re.compile(r"(?i)sshpass\s{1,4}-p\s{0,4}[\"']?(?P<value>[^\s\"'`\[]{1,256})"), is_no_variable
    ),
    Pattern(
        ("mysql",),
        re.compile(r"(?i)mysql\w{0,8}\s(?:[^\n|;]{0,200}?\s)??-p[\"']?(?P<value>[^\s\"'`\[]{4,128})"),
        is_no_variable,
    ),
)
