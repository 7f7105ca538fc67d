"""What a look at a file found, detector by detector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from kvaudit.redaction.detectors import Detector, Hit, find, find_named
from kvaudit.redaction.strings import masked

MOST_EXAMPLES = 5
_LARGEST_REMEMBERED = 256
_MOST_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class Example:
    """`masked` is the beginning of a value and its length, never the whole."""

    place: str
    masked: str


@dataclass(frozen=True, slots=True)
class Value:
    """Something that was found, without what it is."""

    detector: str
    digest: bytes
    masked: str


@dataclass(slots=True)
class Finding:
    """What one detector finds: in how many places of the file, how many distinct values, in how many requests (of
    kvaudit's own traces) or lines (of any other file). `examples` are values with the first place of each.
    """

    detector: str
    places: int = 0
    records: int = 0
    examples: dict[bytes, Example] = field(default_factory=dict)
    values: set[bytes] = field(default_factory=set)


class Findings:
    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.detectors = detectors
        self._found: dict[str, Finding] = {}
        self._remembered: dict[tuple[str, str], list[Value]] = {}

    def ordered(self) -> list[Finding]:
        """In the order of the detectors, those that found something."""
        return [self._found[detector.name] for detector in self.detectors if detector.name in self._found]

    def hits(self, text: str) -> list[Hit]:
        return find(self.detectors, text)

    def values_of(self, text: str, name: str = "") -> list[Value]:
        """`name` is that of the field whose text it is, empty where it tells nothing."""
        known = self._remembered.get((name, text))
        if known is None:
            named = find_named(self.detectors, name, text) if name else ()
            known = [value(hit.name, text[hit.start : hit.end]) for hit in find(self.detectors, text, named)]
            if len(text) <= _LARGEST_REMEMBERED and len(self._remembered) < _MOST_REMEMBERED:
                self._remembered[name, text] = known
        return known

    def count(self, values: Iterable[Value]) -> None:
        """Each of the values has one place more."""
        for one in values:
            finding = self._found.setdefault(one.detector, Finding(one.detector))
            finding.places += 1
            finding.values.add(one.digest)

    def count_record(self, detectors: Iterable[str]) -> None:
        for detector in detectors:
            self._found[detector].records += 1

    def give_examples(self, values: Iterable[Value], place: str) -> None:
        """`values` have been counted."""
        for one in values:
            examples = self._found[one.detector].examples
            if len(examples) < MOST_EXAMPLES:
                examples.setdefault(one.digest, Example(place, one.masked))

    def add(self, texts: Iterable[tuple[str, str]], place: str) -> set[str]:
        """Count what is in the texts, given with the names of their fields, and say which detectors found something."""
        values = [one for name, text in texts for one in self.values_of(text, name)]
        self.count(values)
        self.give_examples(values, place)
        return {one.detector for one in values}


def value(detector: str, text: str) -> Value:
    return Value(detector, sha256(text.encode("utf-8", "surrogatepass")).digest(), masked(text))
