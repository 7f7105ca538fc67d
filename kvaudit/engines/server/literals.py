"""Keys that stand in an option as they are, where a manifest would keep them, and not as `$NAME` of the environment.

What is looked for is a value under a name that keys have, or the form of a known service's key. Nobody can tell other
values from the words beside them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvaudit.engines.server.jsons import value_in, with_texts
from kvaudit.proxy.credentials import in_header, in_path, in_url, is_credential_field, looks_drawn
from kvaudit.proxy.secrets import Secrets
from kvaudit.redaction.key_contexts import CONTEXTS
from kvaudit.redaction.key_forms import FORMS

A_KEY = ""
"""In place of a name, where there is none."""
_NAME = re.compile(r"auth|key|token|secret|pass|^pw|^sig|credential", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{?\w+\}?")
_SCHEMES = frozenset({"", "bearer", "basic", "token"})
_UUID = re.compile(r"(?i)[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HEADER = re.compile(r"([\w-]+):\s*(\S.*)", re.DOTALL)
_SETTING = re.compile(r"-*([A-Za-z][\w.-]*)=(.+)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z][\w-]*)")
_USERS = frozenset({"-u", "--user", "--proxy-user"})
_QUOTES = str.maketrans("'\"`", "   ")


def in_query(query: str) -> Iterator[str]:
    """The names of parameters whose values are keys."""
    for name, value in parse_qsl(query):
        if _NAME.search(name) and not _is_variable(value):
            yield name
    if any(looks_drawn(part) for part in query.split("&") if "=" not in part):
        yield A_KEY


def in_address(text: str) -> Iterator[str]:
    """The same of an address, its path among it."""
    yield from in_query(urlsplit(text).query)
    if any(map(_is_key, in_url(text))):
        yield A_KEY


def in_plain_address(text: str) -> Iterator[str]:
    """The same where nothing is put in for `$NAME`, and ids that are no keys cannot be avoided."""
    if any(map(_has_form, in_path(urlsplit(text).path))):
        yield A_KEY


def in_body(text: str) -> Iterator[str]:
    value = value_in(text)
    if isinstance(value, dict | list):
        yield from _in_json(value)
    else:
        yield from in_query(text)
        yield from _in_text(text)


def in_command(text: str) -> Iterator[str]:
    """Of a shell: settings, options, headers, users and bodies of the programs that it names."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.translate(_QUOTES).split()
    by_curl = any(word.endswith("curl") for word in words)
    for before, word in pairwise(["", *words]):
        if option := _OPTION.fullmatch(before):
            yield from _named(option[1], word)
        if setting := _SETTING.fullmatch(word):
            yield from _named(setting[1], setting[2])
        if (header := _HEADER.fullmatch(word)) and any(map(_is_key, in_header(header[1], header[2]))):
            yield header[1]
        if before in _USERS and by_curl and not _is_variable(word.partition(":")[2]):
            yield before
        if isinstance(value := value_in(word), dict | list):
            yield from _in_json(value)
    yield from _in_text(" ".join(words))


def _named(name: str, value: str) -> Iterator[str]:
    if is_credential_field(name, value) and not (_is_variable(value) or value.startswith(("/", "./", "~"))):
        yield name


def _in_json(value: Any) -> Iterator[str]:
    """Leaves nothing of the value."""
    pending = [value]
    while pending:
        part = pending.pop()
        for name, below in part.items() if isinstance(part, dict) else ():
            if isinstance(below, str) and _NAME.search(name) and not _is_variable(below):
                yield name
        pending += [
            below for below in (part.values() if isinstance(part, dict) else part) if isinstance(below, dict | list)
        ]
    texts: list[str] = []

    def blank(text: str) -> str:
        texts.append(text)
        return _without_variables(text)

    blanked = with_texts(value, blank)
    yield from chain.from_iterable(map(_in_text, texts))
    if Secrets((), b"", "").take_from({"body": blanked}):
        yield A_KEY


def _in_text(text: str) -> Iterator[str]:
    plain = text.translate(_QUOTES)
    lower = text.lower()
    values = (text[start:end] for pattern in (*FORMS, *CONTEXTS) for start, end in pattern.spans(text, lower))
    if any(map(_is_key, chain(values, in_url(plain)))):
        yield A_KEY


def _has_form(text: str) -> bool:
    return any(True for form in FORMS for _ in form.spans(text, text.lower()))


def _is_key(value: str) -> bool:
    return not (_is_variable(value) or _UUID.fullmatch(value))


def _is_variable(value: str) -> bool:
    return not value or "$" in value


def _without_variables(text: str) -> str:
    """Without `$NAME`, and without what stands before it in a header; other texts as they are."""
    if "$" not in text:
        return text
    rest = _VARIABLE.sub("", text)
    return "" if rest.strip().lower() in _SCHEMES else rest
