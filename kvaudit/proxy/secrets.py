"""The credentials of one request: never recorded, wherever they stand in it or its answer."""

from __future__ import annotations

import hmac
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from kvaudit.proxy.credentials import (
    holds_headers,
    in_header,
    in_path,
    in_query,
    in_url,
    is_credential_field,
    is_credential_header,
    is_mixed,
)
from kvaudit.redaction.hinted import are_letters_at_random

_SHORTEST, _SHORTEST_MIXED = 12, 8
"""Characters. What is shorter (`EMPTY`, `dummy`) would be found in plain text; letters with digits are rarer."""

_LONGER_THAN_WORDS = 24
"""Letters."""

_CONTENT = frozenset(
    {
        *("messages", "input", "prompt", "system", "instructions", "suffix", "documents", "content", "text"),
        *("description", "function", "functions", "arguments", "chat_template", "stop"),
        *("input_schema", "schema", "json_schema", "response_format", "guided_json", "structured_outputs"),
    }
)
"""Fields that become the prompt or describe the answer: a name in them says nothing of credentials."""

_SCHEMA = ("properties", "$ref", "$defs")

_PLAIN, _IN_HEADERS, _IN_CREDENTIAL, _IN_CONTENT = "plain", "headers", "credential", "content"

_KEY = os.urandom(16)
"""Of this process alone: placeholders tell equal secrets from different ones, and nothing else of them."""

_NAMES = (
    *("api_key", "api-key", "apikey", "access_key", "access-key", "accesskey", "_token", "-token", "accesstoken"),
    *("authorization", "password", "passwd", "passphrase", "secret", "cookie", "credential"),
)
"""What names of credentials hold, in lower case."""

_SCHEMES = frozenset({"bearer", "basic", "token", "apikey", "api-key"})
_QUOTED_NAME = re.compile(r'"([\w.-]{2,60})"\s*:')
_ESCAPED = re.compile(r"\\u00([0-7][0-9a-fA-F])|%([2-7][0-9a-fA-F])")


def placeholder(secret: str) -> str:
    return f"[secret-{hmac.digest(_KEY, secret.encode(errors='replace'), 'sha256')[:4].hex()}]"


class Secrets:
    """What is known of a request's credentials: from its headers, query and path, then (`take_from`) from its body."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], query: bytes, path: str) -> None:
        self._told: dict[str, str] = {}
        for name, value in headers:
            for text in {value.decode("latin-1"), value.decode(errors="replace")}:
                self._add(in_header(name.decode("latin-1"), text))
        self._add(in_query(query.decode("latin-1")))
        self._add(in_path(path))

    def take_from(self, body: dict[str, Any], text: str) -> bool:
        """Put placeholders in a request, in place: for the values of fields named like credentials, outside of what
        becomes the prompt, and wherever a known secret stands. Whether there were any. `text` is the request's JSON.
        """
        found = self._take_fields(body)
        if r"\u" in text or self.are_in(text):  # else none of them stands in it, in any form
            found |= self.replace(body)
        return found

    def replace(self, values: dict[str, Any]) -> bool:
        """Put placeholders where known secrets stand in the texts and keys of values, in place."""
        found = False
        if not self._told:
            return found
        for container, key, value, _ in _walk(values):
            if isinstance(value, str) and (clean := self.removed(value)) != value:
                container[key], found = clean, True
            if isinstance(key, str) and (clean := self.removed(key)) != key:
                container[clean], found = container.pop(key), True
        return found

    def removed(self, text: str) -> str:
        """The text with placeholders for known secrets."""
        if not self.are_in(text):
            return text
        forms = sorted(self._told, key=len, reverse=True)
        return re.sub("|".join(map(re.escape, forms)), lambda match: self._told[match[0]], text)

    def are_in(self, text: str) -> bool:
        return any(form in text for form in self._told)

    def may_be_in(self, text: str) -> bool:
        """Whether a body that nobody can parse may hold credentials: known ones, or fields named like them."""
        plain = _ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), text.replace("\0", ""))
        lower = plain.lower()
        return self.are_in(plain) or self.are_in(text) or any(name in lower for name in _NAMES)

    def _take_fields(self, body: dict[str, Any]) -> bool:
        found = False
        for container, key, value, place in _walk(body, without_content=True):
            if place is _IN_CREDENTIAL and type(value) in (str, int, float) and value != "":
                container[key], found = self._taken(str(value)), True
            elif isinstance(value, str) and (secrets := set(in_url(value))):
                self._add(secrets)
                container[key], found = _without(value, secrets), True
        return found

    def _taken(self, value: str) -> str:
        """What stands for the value of a credential; a scheme before it (`Bearer KEY`) stays."""
        scheme, _, rest = value.partition(" ")
        if scheme.lower() in _SCHEMES and rest and " " not in rest:
            self._add((rest, *in_header("authorization", value)))
            return f"{scheme} {placeholder(rest)}"
        self._add((value, *in_header("authorization", value)))
        return placeholder(value)

    def _add(self, secrets: Iterable[str]) -> None:
        for secret in filter(_is_telling, secrets):
            for form in _forms(secret):
                self._told.setdefault(form, placeholder(secret))
            self._told[secret] = placeholder(secret)  # also where it is a form of another


def names_fields_twice(text: str) -> bool:
    """Whether JSON with names of credentials has an object with two equal names: parsed, only the last is there."""
    names = Counter(_QUOTED_NAME.findall(text))
    if not any(count > 1 and is_credential_header(name, None) for name, count in names.items()):
        return False
    twice = False

    def pairs(given: list[tuple[str, Any]]) -> None:
        nonlocal twice
        twice |= len({name for name, _ in given}) < len(given)

    try:
        json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return True
    return twice


def _without(url: str, secrets: Iterable[str]) -> str:
    """A URL with placeholders for parts of it, however short they are."""
    for secret in sorted(secrets, key=len, reverse=True):
        url = re.sub(rf"(?<=[:=/]){re.escape(secret)}(?=[@&#/?]|$)", placeholder(secret), url)
    return url


def _is_telling(secret: str) -> bool:
    """Whether a secret may be looked for in texts: not where an ordinary word, or a placeholder, may equal it."""
    if secret.isalpha():
        return len(secret) >= _LONGER_THAN_WORDS or are_letters_at_random(secret)
    return len(secret) >= (_SHORTEST_MIXED if is_mixed(secret) else _SHORTEST)


def _forms(secret: str) -> set[str]:
    """As it is, as in a string of JSON, and with percent signs."""
    quoted = {quote(secret, safe=safe) for safe in ("", "/")}
    lower = {re.sub("%..", lambda match: match[0].lower(), text) for text in quoted}
    escaped = {json.dumps(secret, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    slashed = {text.replace("/", r"\/") for text in escaped}
    return {secret, *quoted, *lower, *escaped, *slashed}


def _walk(root: dict[str, Any], *, without_content: bool = False) -> Iterator[tuple[Any, Any, Any, str]]:
    """(container, key or index, value, kind of place) of everything in a JSON object, however deep."""
    waiting: list[tuple[Any, str]] = [(root, _PLAIN)]
    while waiting:
        container, place = waiting.pop()
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            inner = _place_of(key, value, place) if isinstance(key, str) else place
            if without_content and inner is _IN_CONTENT:
                continue
            if isinstance(value, dict | list):
                waiting.append((value, inner))
            yield container, key, value, inner


def _is_schema(value: object) -> bool:
    return isinstance(value, dict) and (value.get("type") == "object" or any(name in value for name in _SCHEMA))


def _place_of(name: str, value: object, place: str) -> str:
    if place in (_IN_CONTENT, _IN_CREDENTIAL):
        return place
    if name in _CONTENT or _is_schema(value):
        return _IN_CONTENT
    if place is _IN_HEADERS:
        return _IN_CREDENTIAL if is_credential_header(name, value) else place
    if is_credential_field(name, value):
        return _IN_CREDENTIAL
    return _IN_HEADERS if holds_headers(name) else place
