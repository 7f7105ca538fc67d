"""Texts with placeholders in the place of what the detectors find."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvaudit.redaction.detectors import Detector, Hit, find, find_named
from kvaudit.redaction.placeholders import Placeholders
from kvaudit.redaction.strings import as_text


class Replacement(NamedTuple):
    detector: str
    placeholder: str


class Redacted(NamedTuple):
    """`replaced` has an entry for every place; the same value has the same placeholder."""

    text: str
    replaced: tuple[Replacement, ...]


class Redactor:
    """Replaces in texts; what it remembers of them are hashes."""

    def __init__(self, detectors: Sequence[Detector], salt: bytes) -> None:
        """`salt`: whoever knows it can try values against their placeholders."""
        self._detectors = tuple(detectors)
        self._placeholders = Placeholders(salt)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(detector.name for detector in self._detectors)

    def find(self, text: str, known: Iterable[Hit] = ()) -> list[Hit]:
        return find(self._detectors, text, known)

    def redact(self, text: str, known: Iterable[Hit] = (), name: str = "") -> Redacted:
        """The text without what is `known` of it and what the detectors find, until they find nothing more.

        `name` is that of the field whose text it is, empty where it tells nothing.
        Ends, as each round leaves less outside of placeholders. Raises what a detector raises.
        """
        replaced: list[Replacement] = []
        while hits := self.find(text, [*known, *(find_named(self._detectors, name, text) if name else ())]):
            parts, end, known = [], 0, ()
            for hit in hits:
                placeholder = self._placeholders.of(hit.name, text[hit.start : hit.end])
                replaced.append(Replacement(hit.name, placeholder))
                parts += [text[end : hit.start], placeholder]
                end = hit.end
            text = "".join(parts) + text[end:]
        return Redacted(text, tuple(replaced))

    def redact_values(self, value: Any) -> tuple[Any, tuple[Replacement, ...]]:
        """The same for every string and long number of a JSON value and the names of its fields, which tell what a
        text below them is.
        """
        replaced: list[Replacement] = []

        def walk(part: Any, name: str = "") -> Any:
            if isinstance(part, dict):
                return {walk(below): walk(value, below) for below, value in part.items()}
            if isinstance(part, list | tuple):
                return [walk(below, name) for below in part]
            if (text := as_text(part)) is None:
                return part
            redacted = self.redact(text, name=name)
            replaced.extend(redacted.replaced)
            return redacted.text if redacted.replaced else part

        return walk(value), tuple(replaced)
