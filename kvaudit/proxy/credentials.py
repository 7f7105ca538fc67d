"""Where a request carries what proves who asks: headers, parameters, path segments, fields of bodies, URLs in them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import unquote, unquote_plus, urlsplit

from kvaudit.redaction.hinted import are_letters_at_random
from kvaudit.redaction.key_forms import FORMS

_SURE = frozenset(
    {
        *("key", "apikey", "token", "secret", "auth", "authorization", "jwt"),
        *("password", "passwd", "credential", "credentials"),
    }
)
"""Last words of the names of headers and parameters whose values are credentials."""
_GUESSED = frozenset({"cookie", "cookies", "session", "signature", "sig", "code"})
"""Words of names whose values often are plain words: what looks drawn in them is taken."""
_HARMLESS = frozenset({"idempotency-key", "x-idempotency-key", "sec-websocket-key"})

_FIELD = re.compile(
    r"(?:.+_)?(?:(?:api|access|auth|secret|private|account|client|encryption|master|signing|subscription)_?keys?(?:_id)?"
    r"|(?:access|api|auth|authorization|bearer|refresh|id|session|security|csrf)_token"
    r"|apikeys?|authorization|passw(?:or)?d|passphrase|pwd|secrets?|cookies?|credentials?|jwt)(?:_?\d{1,3})?"
)
_GUESSED_FIELD = frozenset({"key", "token", "auth", "bearer", "signature", "sig"})
_OF_CACHES = "cache"
"""`prompt_cache_key` steers a cache, and looks drawn."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_PARAMETER = re.compile(r"(?:^|[\s,;])[\w.-]+=[^=\s]")
_NAME_OF_PARAMETER = re.compile(r"^[\w.-]+=(?=[^=])")

_UUID = re.compile(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PARTS = re.compile(r"[A-Za-z0-9]+")
_SHORTEST_PART, _DRAWN_CHARACTERS = 6, 16


def looks_drawn(text: str) -> bool:
    """Whether a text without blanks is a key or an id that was drawn at random, not a name made of words and numbers.

    It holds a UUID, the form of a known service's key, sixteen characters in parts of letters and digits together, or
    twenty letters that no language has in a row.
    """
    parts = _PARTS.findall(text)
    mixed = sum(len(part) for part in parts if len(part) >= _SHORTEST_PART and is_mixed(part))
    if mixed >= _DRAWN_CHARACTERS or _UUID.search(text) or any(map(are_letters_at_random, parts)):
        return True
    lower = text.lower()
    return any(True for form in FORMS for _ in form.spans(text, lower))


def is_mixed(text: str) -> bool:
    """Whether a text has both letters and digits."""
    return any(map(str.isalpha, text)) and any(map(str.isdigit, text))


def in_header(name: str, value: str) -> Iterator[str]:
    """The secrets of a header, or of a parameter of a query."""
    words = _words(name)
    if name.lower() in _HARMLESS or not (_SURE | _GUESSED).intersection(words):
        return
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    rest = rest.strip()
    if words[-1] not in _SURE or _PARAMETER.search(rest or value):
        yield from filter(looks_drawn, _pieces(value))
    elif scheme.lower() == "basic":
        yield rest
        yield from _user_and_password(rest)
    else:
        yield rest if rest and " " not in rest else value


def in_query(query: str) -> Iterator[str]:
    """The secrets of a query, as they are written there and without percent signs."""
    for part in query.split("&"):
        name, _, value = part.partition("=")
        for written in {value, unquote_plus(value)} - {""}:
            yield from in_header(unquote_plus(name), written)


def in_path(path: str) -> Iterator[str]:
    """The segments of a path that look drawn."""
    return filter(looks_drawn, map(str.strip, path.split("/")))


def in_url(text: str) -> Iterator[str]:
    """The secrets of a text that is a URL: password, parameters, segments of the path that look drawn."""
    if "://" not in text or " " in text:
        return
    try:
        url = urlsplit(text)
        user, password = url.username or "", url.password or ""
    except ValueError:
        return
    if password or looks_drawn(user):
        yield from (password, unquote(password)) if password else (user, unquote(user))
    yield from in_path(url.path)
    yield from in_query(url.query)


def is_credential_field(name: str, value: object) -> bool:
    """Whether a field of a body is named like a credential; a `token` or `key` is one where its value looks drawn."""
    words = _words(name)
    if _FIELD.fullmatch("_".join(words)):
        return True
    guessed = words[-1] in _GUESSED_FIELD and _OF_CACHES not in words and name.lower() not in _HARMLESS
    return guessed and isinstance(value, str) and looks_drawn(value)


def is_credential_header(name: str, value: object) -> bool:
    """The same for a field of an object of headers."""
    words = _words(name)
    named = words[-1] in _SURE | _GUESSED and name.lower() not in _HARMLESS
    return named or is_credential_field(name, value)


def holds_headers(name: str) -> bool:
    """Whether the fields of an object under this name are headers: `headers`, `extra_headers`."""
    return _words(name)[-1] in ("header", "headers")


@lru_cache(1 << 12)
def _words(name: str) -> tuple[str, ...]:
    """`apiKey`, `API-Key` and `api_key` as the same words, at least one."""
    return tuple(_BETWEEN_WORDS.split(_CAMEL.sub("_", name[:100]).lower().strip("_-. ")))


def _pieces(value: str) -> Iterator[str]:
    """The values of `name=value; name=value` and `Digest name="value", name=value`, and what signs divide in them."""
    for part in re.split(r"[;,\s]+", value):
        piece = _NAME_OF_PARAMETER.sub("", part).strip('"')
        for written in {piece, unquote(piece)}:
            yield from (written, *re.split(r"[/:|.]", written))


def _user_and_password(encoded: str) -> Iterator[str]:
    try:
        decoded = base64.b64decode(encoded + "==").decode(errors="replace")
    except binascii.Error:
        return
    user, _, password = decoded.partition(":")
    yield from (decoded, password)
    if looks_drawn(user):
        yield user
