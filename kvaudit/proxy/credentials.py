"""Where a request carries what proves who asks: headers, parameters, path segments, fields of bodies, URLs in them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import filterfalse, pairwise
from urllib.parse import unquote, unquote_plus, urlsplit

from kvaudit.redaction.hinted import are_letters_at_random
from kvaudit.redaction.key_forms import FORMS

_SURE = re.compile(
    r".*(?:(?:api|access|auth|secret|private|account|client|encryption|master|signing|subscription)keys?(?:id)?"
    r"|(?:access|api|auth|authorization|bearer|refresh|session|security|csrf)tokens?|authorization|authentication"
    r"|passw(?:or)?d|passphrase|passcode|userpass|pwd|secrets?|cookies?|jwt|connectionstring|connstr"
    r"|credentials?(?:json)?|serviceaccountjson)|idtoken"
)
"""Names whose values are credentials, in lower case and without what separates their words."""
_SURE_LAST = frozenset({"pass", "dsn"})
_SURE_AT_END = (("id", "token"),)
_TOKENS = re.compile(r".*(?:tokens?|bearer)")
"""Names whose values are credentials in a header or a query; in a body (`eos_token`) only what looks drawn."""
_WEAK = frozenset(
    {"key", "keys", "token", "auth", "bearer", "jwt", "secret", "cookie", "cookies", "session", "signature"}
    | {"sig", "sas", "pat", "csrf", "code"}
)
"""Words of names whose values often are plain words: what looks drawn in them is taken."""
_WEAK_FIELDS = frozenset({"key", "token", "auth", "bearer", "signature", "sig", "sas", "pat"})
_HARMLESS = frozenset({"cache", "idempotency", "websocket", "partition", "sort", "routing"})
"""`prompt_cache_key` steers a cache, and looks drawn."""
_NAMES_OF_MODELS_FOLLOW = frozenset({"deployments", "models", "engines"})

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_NUMBER = re.compile(r"[^a-z0-9]*v?\d{1,3}$")
_PARAMETER = re.compile(r"(?:^|[\s,;])[\w.-]+=[^=\s]")
_NAME_OF_PARAMETER = re.compile(r"([\w.-]+)=(?=[^=])")
_DIVIDING = re.compile(r"""[/:|.,"'{}\[\]\\\s]+""")
_SCHEMES = re.compile(r"(?i)((?:(?:bearer|basic|token|apikey|api-key)\s+)*)(\S+)")
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")

_UUID = re.compile(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEY_PREFIX = re.compile(r"[srp]k[-_]|(?i:key|token|secret|api)[-_]")
_PARTS = re.compile(r"[A-Za-z0-9]+")
_SHORTEST_PART, _DRAWN_CHARACTERS, _DRAWN_SEGMENT = 6, 16, 24
_WORDS_IN_A_ROW = re.compile(r"[A-Za-z][a-z]{3,}")
_UNSPEAKABLE = re.compile(r"[bcdfghjklmnpqrstvwxz]{5}")
_MOST_DIGITS_OF_WORDS = 0.2

_WORD = r"(?>[A-Za-z]{1,23}(?![A-Za-z0-9])|[A-Za-z0-9]{1,3})"
_MADE_OF_WORDS = re.compile(rf"{_WORD}(?:[-_./:]{_WORD})*+")
_MOST_DIGITS = 2
_HUMP = re.compile(r"[a-z](?=[A-Z])")
_SHORTEST_HUMP = 3
"""Letters: `noKeyRequired` has humps of three letters and more on average, letters drawn from both cases of two."""


def looks_drawn(text: str) -> bool:
    """Whether a text without blanks is a key or an id that was drawn at random, not a name made of words and numbers.

    It holds a UUID, the form of a known service's key, sixteen characters in parts of letters and digits together, or
    twenty letters that no language has in a row.
    """
    parts = _PARTS.findall(text)
    mixed = sum(len(part) for part in parts if len(part) >= _SHORTEST_PART and is_mixed(part))
    return mixed >= _DRAWN_CHARACTERS or any(map(are_letters_at_random, parts)) or _has_form_of_key(text)


def is_made_of_words(text: str) -> bool:
    """`no-key-required`, `gpt-4o-mini`: words, with two digits at most, that do not look drawn."""
    few_digits = sum(map(str.isdigit, text)) <= _MOST_DIGITS
    if not few_digits or _MADE_OF_WORDS.fullmatch(text) is None:
        return False
    return not looks_drawn(text) and not any(map(_is_jumbled, _PARTS.findall(text)))


def _is_jumbled(part: str) -> bool:
    """Whether capitals stand between small letters so often that no words can be meant."""
    humps = len(_HUMP.findall(part))
    return humps > 1 and len(part) < _SHORTEST_HUMP * (humps + 1)


def is_mixed(text: str) -> bool:
    """Whether a text has both letters and digits."""
    return any(map(str.isalpha, text)) and any(map(str.isdigit, text))


def in_header(name: str, value: str) -> Iterator[str]:
    """The secrets of a header. A value that is made of words is none: `Bearer no-key-required` stands in texts too."""
    if value[:6].lower().strip() == "basic":
        return in_parameter(name, value)
    return filterfalse(is_made_of_words, in_parameter(name, value))


def in_parameter(name: str, value: str) -> Iterator[str]:
    """The secrets of a parameter of a query, or of a header, also where they are words."""
    value = value.strip()
    scheme, rest = without_scheme(value)
    if not (is_credential_name(name) or _is_token(name)):
        if _is_weak(name):
            yield from filter(looks_drawn, (value,))
            yield from _in_parameters(value)
    elif "cookie" in name.lower() or _PARAMETER.search(rest):
        yield from _in_parameters(value)
    elif scheme.lower().startswith("basic"):
        yield rest
        yield from _user_and_password(rest)
    else:
        alone = value.split()[-1] if len(value.split()) == 2 else rest
        yield from {alone, alone.rstrip(",;").strip("\"'")}


def without_scheme(value: str) -> tuple[str, str]:
    """(`Bearer ` or the like, the rest), where the rest has no blank; else nothing and the value."""
    match = _SCHEMES.fullmatch(value)
    return (match[1], match[2]) if match else ("", value)


def in_query(query: str) -> Iterator[str]:
    """The secrets of a query, as they are written there and without percent signs."""
    for part in query.split("&"):
        name, _, value = part.partition("=")
        for written in {value, unquote_plus(value)} - {""}:
            yield from in_parameter(unquote_plus(name), written)


def in_path(path: str) -> Iterator[str]:
    """The segments of a path that look like keys, and do not stand where models are named."""
    for before, segment in pairwise(["", *map(str.strip, path.split("/"))]):
        if before.lower() not in _NAMES_OF_MODELS_FOLLOW and _is_key(segment):
            yield segment


def in_url(text: str) -> Iterator[str]:
    """The secrets of URLs in a text: passwords, parameters, segments of paths that look like keys."""
    if "://" not in text:
        return
    for written in {text if _URL.match(text) else "", *text.split()}:
        if "://" in written:
            yield from _in_one_url(written.strip())


@lru_cache(1 << 12)
def is_credential_name(name: str) -> bool:
    """Whether what stands under this name, in whatever place, is a credential, whatever it looks like."""
    words = _words(name)
    return words[-1] in _SURE_LAST or words[-2:] in _SURE_AT_END or _SURE.fullmatch("".join(words)) is not None


def is_credential_field(name: str, value: object) -> bool:
    """Whether a field of a body is named like a credential; a `token` or `key` is one where its value looks drawn."""
    if is_credential_name(name):
        return not (isinstance(value, dict | list) and name.lower().endswith("authentication"))
    weak = _words(name)[-1] in _WEAK_FIELDS and _HARMLESS.isdisjoint(_words(name))
    return weak and isinstance(value, str) and looks_drawn(value)


def is_credential_header(name: str, value: object) -> bool:
    """The same for a field of an object of headers."""
    drawn = isinstance(value, str) and any(True for _ in in_parameter(name, value))
    return _is_token(name) or drawn or is_credential_field(name, value)


def holds_headers(name: str) -> bool:
    """Whether the fields of an object under this name are headers: `headers`, `extra_headers`."""
    return _words(name)[-1] in ("header", "headers")


def _in_one_url(text: str) -> Iterator[str]:
    try:
        url = urlsplit(text)
        user, password = url.username or "", url.password or ""
    except ValueError:
        return
    if password or looks_drawn(user):
        yield from (password, unquote(password)) if password else (user, unquote(user))
    yield from in_path(url.path)
    yield from in_query(url.query)


@lru_cache(1 << 12)
def _words(name: str) -> tuple[str, ...]:
    """`apiKey`, `API-Key-V2` and `api_key` as the same words, at least one."""
    lower = _CAMEL.sub("_", name[:100]).lower().strip("_-. ")
    return tuple(_BETWEEN_WORDS.split(_NUMBER.sub("", lower)))


def _is_token(name: str) -> bool:
    return _words(name)[-1] == "auth" or _TOKENS.fullmatch("".join(_words(name))) is not None


def _is_weak(name: str) -> bool:
    """An id (`X-Session-Id`) is none."""
    words = _words(name)
    return words[-1] != "id" and not _WEAK.isdisjoint(words) and _HARMLESS.isdisjoint(words)


def _is_key(segment: str) -> bool:
    """Of a path, where names of models stand too: `DeepSeekR1DistillQwen32B` is one."""
    if _has_form_of_key(segment):
        return True
    long = len(segment) >= _DRAWN_SEGMENT or _KEY_PREFIX.match(segment) is not None
    return long and looks_drawn(segment) and not _is_name(segment)


def _is_name(text: str) -> bool:
    digits, letters = sum(map(str.isdigit, text)), sum(map(len, _WORDS_IN_A_ROW.findall(text)))
    few = digits <= _MOST_DIGITS_OF_WORDS * len(text)
    return few and 2 * letters >= len(text) and not _UNSPEAKABLE.search(text) and not are_letters_at_random(text)


def _has_form_of_key(text: str) -> bool:
    lower = text.lower()
    return _UUID.search(text) is not None or any(True for form in FORMS for _ in form.spans(text, lower))


def _in_parameters(value: str) -> Iterator[str]:
    """What looks drawn in the values of `name=value; name=value`, `Digest name="value", name=value` or in JSON there,
    and the values of parameters that are named like credentials.
    """
    for part in re.split(r"[;,\s]+", value):
        named = _NAME_OF_PARAMETER.match(part)
        piece = (part[named.end() :] if named else part).strip('"')
        for written in {piece, unquote(piece)}:
            if named and (is_credential_name(named[1]) or _is_token(named[1])):
                yield written
            yield from filter(looks_drawn, (written, *_DIVIDING.split(written)))


def _user_and_password(encoded: str) -> Iterator[str]:
    try:
        decoded = base64.b64decode(encoded + "==").decode(errors="replace")
    except binascii.Error:
        return
    user, _, password = decoded.partition(":")
    yield from (decoded, password)
    if looks_drawn(user):
        yield user
