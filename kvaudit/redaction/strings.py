"""The texts of a JSON object, and as much of a value as may be shown."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvaudit.redaction.detectors import Detector, find

SHOWN_CHARACTERS = 2
_SHORTEST_NUMBER = 10**11


def strings_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name of the field, text) of all strings and long numbers of a JSON object, names of fields among them.

    Bodies that a capture keeps in base64 are decoded.
    """
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            yield name, value
            if name == "base64" and (decoded := _decoded(value)):
                yield name, decoded
        elif isinstance(value, dict):
            for below, part in reversed(value.items()):
                waiting.append((below, part))
                if not isinstance(part, str):
                    waiting.append((name, below))
        elif isinstance(value, list):
            waiting += [(name, part) for part in reversed(value)]
        elif (text := as_text(value)) is not None:
            yield name, text


def as_text(value: Any) -> str | None:
    """What is looked at of a value that holds no others: strings, and numbers that are long enough to be a card's."""
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int and abs(value) >= _SHORTEST_NUMBER else None


def distinct_strings(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name of the field, text), and (nothing, name of a field) for names that are no text already."""
    found = dict.fromkeys(strings_of(values))
    texts = {text for _, text in found}
    return [*found, *(("", name) for name in dict.fromkeys(name for name, _ in found) if name not in texts)]


def masked(value: str) -> str:
    """The beginning of a value and its length."""
    return f"{value[:SHOWN_CHARACTERS]}... ({len(value):,} characters)"


def masked_name(name: str, detectors: Sequence[Detector]) -> str:
    """A name for people to find something by, quoted, what the detectors find in it masked."""
    shown, end = "", 0
    for hit in find(detectors, name):
        shown += f"{name[end : hit.start]}{name[hit.start : hit.start + SHOWN_CHARACTERS]}..."
        end = hit.end
    return repr(shown + name[end:])


def _decoded(text: str) -> str | None:
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
