"""The credentials of one request: never recorded, wherever they stand in it or its answer."""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import filterfalse
from typing import Any

from kvaudit.proxy.credentials import (
    holds_headers,
    in_header,
    in_path,
    in_query,
    in_url,
    is_credential_field,
    is_credential_header,
    is_credential_name,
    is_made_of_words,
    is_mixed,
    without_scheme,
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

_PLAIN, _IN_HEADERS, _IN_HEADER, _IN_CREDENTIAL, _IN_CONTENT = "plain", "headers", "header", "credential", "content"
"""`header`: a list below headers, which may be a pair of name and value."""

_NAMES_OF_PAIRS = ("name", "key", "header")

_KEY = os.urandom(16)
"""Of this process alone: placeholders tell equal secrets from different ones, and nothing else of them."""

_NAME = re.compile(r"[A-Za-z][\w.-]{1,60}")
_PAIR = re.compile(r'(?<!\\)"((?:[^"\\]|\\.){1,100}+)"\s*+:\s*+(?:"((?:[^"\\]|\\.)*+)|([\w.-]++))', re.DOTALL)
_ESCAPED = re.compile(r"\\+u00([0-7][0-9a-fA-F])|%([2-7][0-9a-fA-F])")
_ALPHANUMERIC = re.compile(r"[A-Za-z0-9]*")


def placeholder(secret: str) -> str:
    return f"[secret-{hmac.digest(_KEY, secret.encode(errors='replace'), 'sha256')[:4].hex()}]"


class Secrets:
    """What is known of a request's credentials: from its headers, query and path, then (`take_from`) from its body."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], query: bytes, path: str) -> None:
        self._told: dict[str, str] = {}
        """Secrets with their placeholders, the longest first."""
        for name, value in headers:
            for text in {value.decode("latin-1"), value.decode(errors="replace")}:
                self._add(in_header(name.decode("latin-1"), text))
        self._add(filterfalse(is_made_of_words, in_query(query.decode("latin-1"))))
        self._of_path = set(in_path(path)) - self._told.keys()
        self._add(self._of_path)

    def __bool__(self) -> bool:
        """Whether any are known that can be looked for."""
        return bool(self._told)

    def take_from(self, body: dict[str, Any]) -> bool:
        """Put placeholders in a request, in place: for the values of fields named like credentials, outside of what
        becomes the prompt, and wherever a known secret stands. Whether there were any.
        """
        model = body.get("model")
        for named in self._of_path.intersection(model.split("/") if isinstance(model, str) else ()):
            self._told.pop(named, None)
        found = self._take_fields(body)
        return self.replace(body) or found

    def take_from_dropped(self, text: str) -> bool:
        """Learn the credentials of what JSON drops where an object has equal names. Whether it may drop any."""
        dropped = _dropped(text)
        named = self._take_fields(dropped) if dropped else False
        return named or (dropped != [] and bool(self))

    def take_from_damaged(self, text: str) -> bool:
        """Learn the credentials of a body that nobody can parse. Whether it may hold any."""
        text = text.replace("\0", "")
        named = False
        for name, quoted, bare in _PAIR.findall(text):
            name, value = _unquoted(name), _unquoted(quoted) or bare
            if is_credential_field(name, value):
                self._taken(value)
                named = True
        plain = _unescaped(text)
        return named or self.are_in(text) or any(map(is_credential_name, set(_NAME.findall(plain))))

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
        """The text with placeholders for known secrets, however they are escaped there."""
        plain = _unescaped(text)
        for secret, told in self._told.items():
            if secret in text:
                text = text.replace(secret, told)
                plain = _unescaped(text)
            if ("\\" in text or "%" in text or "+" in text) and _anchor(secret) in plain:
                text = written(secret).sub(told, text)
                plain = _unescaped(text)
        return text

    def are_in(self, text: str) -> bool:
        return self.removed(text) != text

    def _take_fields(self, root: Any, place: str = _PLAIN) -> bool:
        found = False
        for container, key, value, inner in _walk(root, place, without_content=True):
            clean = self._clean(value, inner)
            if clean != value:
                container[key], found = clean, True
        return found

    def _clean(self, value: Any, place: str) -> Any:
        """A value that is no object and no list, without its credentials."""
        if place is _IN_CREDENTIAL and type(value) in (str, int, float) and value != "":
            return self._taken(str(value))
        if not isinstance(value, str):
            return value
        if (inner := _json_in(value)) is not None:
            return json.dumps(inner, ensure_ascii=False) if self._take_fields(inner, place) else value
        if place in (_IN_HEADERS, _IN_HEADER):
            value = "\n".join(map(self._clean_line, value.split("\n")))
        secrets = set(in_url(value))
        self._add(secrets)
        return _without(value, secrets) if secrets else value

    def _clean_line(self, line: str) -> str:
        """The same for a line of headers (`Authorization: Bearer KEY`)."""
        name, colon, value = line.partition(":")
        told = value.strip()
        if not told or not _NAME.fullmatch(name.strip()) or not is_credential_header(name.strip(), told):
            return line
        return f"{name}{colon}{value.replace(told, self._taken(told))}"

    def _taken(self, value: str) -> str:
        """What stands for the value of a credential; a scheme before it (`Bearer KEY`) stays."""
        scheme, rest = without_scheme(value)
        self._add((*in_header("authorization", value), *in_url(value)))
        if not (scheme and is_made_of_words(rest)):
            self._add((rest,))
        if (inner := _json_in(value)) is not None:
            self._take_fields(inner)
        return scheme + placeholder(rest)

    def _add(self, secrets: Iterable[str]) -> None:
        new = {secret: placeholder(secret) for secret in secrets if _is_telling(secret)}
        if not new.keys() <= self._told.keys():
            self._told = dict(sorted((self._told | new).items(), key=lambda item: -len(item[0])))


def _dropped(text: str) -> list[dict[str, Any]] | None:
    """The fields of objects in JSON whose place later ones of the same name take; None where it does not parse."""
    dropped: list[dict[str, Any]] = []

    def pairs(given: list[tuple[str, Any]]) -> dict[str, Any]:
        last = dict(given)
        if len(last) < len(given):
            dropped.extend({name: value} for name, value in given if last[name] is not value)
        return last

    try:
        json.loads(text, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return None
    return dropped


def _json_in(text: str) -> dict[str, Any] | list[Any] | None:
    """The object or the list that a text is as JSON."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict | list) else None


def _unquoted(text: str) -> str:
    """A string of JSON, which may be cut, without its escapes."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return _unescaped(text)


def _without(text: str, secrets: Iterable[str]) -> str:
    """A text with placeholders for parts of URLs in it, however short they are."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = re.sub(rf"(?<=[:=/]){re.escape(secret)}(?=[@&#/?\s]|$)", placeholder(secret), text)
    return text


def _is_telling(secret: str) -> bool:
    """Whether a secret may be looked for in texts: not where an ordinary word, or a placeholder, may equal it."""
    if secret.isalpha():
        return len(secret) >= _LONGER_THAN_WORDS or are_letters_at_random(secret)
    return len(secret) >= (_SHORTEST_MIXED if is_mixed(secret) else _SHORTEST)


def _unescaped(text: str) -> str:
    """ASCII characters that JSON or percent signs escape, as they are."""
    if "%" not in text and "\\u" not in text:
        return text
    return _ESCAPED.sub(lambda match: chr(int(match[1] or match[2], 16)), text)


@lru_cache(256)
def _anchor(secret: str) -> str:
    """Its longest part of letters and digits, which stands in every form of it, but for `_unescaped`."""
    parts: list[str] = _ALPHANUMERIC.findall(secret)
    return max(parts, key=len)


@lru_cache(256)
def written(secret: str) -> re.Pattern[str]:
    """A secret in JSON, in JSON inside of JSON and so on, or with percent signs, whichever characters are escaped."""
    first, *others = re.findall(r"\\+|[^\\]", secret)
    return re.compile(_character(first[0], first=True) + "".join(_character(run[0]) for run in others))


def _character(character: str, *, first: bool = False) -> str:
    """Possessive, and from the start of a row: backslashes may be many, and belong to what follows or are meant."""
    units = character.encode("utf-16-be", "surrogatepass").hex()
    escaped = r"\\++".join(f"u{_any_case(units[at : at + 4])}" for at in range(0, len(units), 4))
    percent = "".join(f"%{_any_case(f'{byte:02x}')}" for byte in character.encode(errors="replace"))
    start = r"(?<!\\)" if first else ""
    if character == "\\":
        return rf"{start}(?:\\(?:{escaped})?|{percent})++"
    if character.isascii() and character.isalnum():
        return rf"(?:{character}|{start}\\*+{escaped}|{percent})"
    named = {" ": r"|\+", "\t": "|t", "\n": "|n", "\r": "|r"}.get(character, "")
    return rf"(?:{start}\\*+(?:{re.escape(character)}|{escaped}{named})|{percent})"


def _any_case(digits: str) -> str:
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in digits)


def _walk(
    root: dict[str, Any] | list[Any], place: str = _PLAIN, *, without_content: bool = False
) -> Iterator[tuple[Any, Any, Any, str]]:
    """(container, key or index, value, kind of place) of everything in JSON, however deep."""
    waiting: list[tuple[Any, str]] = [(root, place)]
    while waiting:
        container, place = waiting.pop()
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            inner = _place_of(container, key, value, place)
            if without_content and inner is _IN_CONTENT:
                continue
            if isinstance(value, dict | list):
                waiting.append((value, inner))
            yield container, key, value, inner


def _is_schema(value: object) -> bool:
    return isinstance(value, dict) and (value.get("type") == "object" or any(name in value for name in _SCHEMA))


def _place_of(container: Any, name: str | int, value: object, place: str) -> str:
    if place in (_IN_CONTENT, _IN_CREDENTIAL):
        return place
    if isinstance(name, int):
        return _place_in_list(container, name, value, place)
    if name in _CONTENT or _is_schema(value):
        return _IN_CONTENT
    if name == "value" and any(_names_credential(container.get(key), value) for key in _NAMES_OF_PAIRS):
        return _IN_CREDENTIAL
    if place in (_IN_HEADERS, _IN_HEADER):
        return _IN_CREDENTIAL if is_credential_header(name, value) else place
    if is_credential_field(name, value):
        return _IN_CREDENTIAL
    return _IN_HEADERS if holds_headers(name) else place


def _place_in_list(container: list[Any], index: int, value: object, place: str) -> str:
    if place is _IN_HEADERS and isinstance(value, list):
        return _IN_HEADER
    if place is _IN_HEADER and index == 1 and _names_credential(container[0], value):
        return _IN_CREDENTIAL
    return place


def _names_credential(name: object, value: object) -> bool:
    return isinstance(name, str) and is_credential_header(name, value)
