"""What a file gives away, as it is: kvaudit's own traces by request and segment, any other file by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

from kvaudit.redaction.borders import Edges, cut_values, edges, stretch_digest, stretches
from kvaudit.redaction.detectors import Detector
from kvaudit.redaction.findings import Finding, Findings, Value, value
from kvaudit.redaction.strings import distinct_strings, masked_name, strings_of

_PROMPTS = ("segments", "prelude")


class Scan(Protocol):
    """Takes the lines of a file in their order. `records` is how many requests or lines were looked at."""

    records: int

    def add_object(self, line: int, values: Mapping[str, Any]) -> None: ...

    def add_text(self, line: int, text: str) -> None:
        """A line that is no JSON object."""

    def findings(self) -> list[Finding]: ...


class LineScan:
    """A log, a capture or any text."""

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.records = 0
        self._findings = Findings(detectors)

    def add_object(self, line: int, values: Mapping[str, Any]) -> None:
        """Names of fields stand before their texts, as they tell what a password is."""
        self.add_text(line, "\n".join(f"{name}: {text}" for name, text in strings_of(values)))

    def add_text(self, line: int, text: str) -> None:
        self.records += 1
        self._findings.count_record(self._findings.add([("", text)], f"line {line}"))

    def findings(self) -> list[Finding]:
        return self._findings.ordered()


class _Part(NamedTuple):
    """A segment of a prompt as its request has it. Two with the same `key` have the same text."""

    number: int
    key: str
    edges: Edges
    begins_message: bool


class _Segment(NamedTuple):
    edges: Edges
    begins_message: bool
    values: list[Value]


class TraceScan:
    """A trace of kvaudit's own. A segment is looked at once, and named by the first request that has it."""

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.records = 0
        self._findings = Findings(detectors)
        self._segments: dict[str, _Segment] = {}
        self._unplaced: set[str] = set()
        self._cut: dict[bytes, frozenset[str]] = {}

    def add_object(self, line: int, values: Mapping[str, Any]) -> None:
        if "request" in values:
            self._add_request(values)
        elif "segment" in values:
            self._add_segment(values)
        else:
            self._findings.add(distinct_strings(values), f"line {line}")

    def add_text(self, line: int, text: str) -> None:
        self._findings.add([("", text)], f"line {line}")

    def findings(self) -> list[Finding]:
        for content_id in sorted(self._unplaced):
            self._findings.give_examples(
                self._segments[content_id].values, f"segment {content_id}, which no request has"
            )
        return self._findings.ordered()

    def _add_segment(self, values: Mapping[str, Any]) -> None:
        content_id = str(values["segment"])
        found = [
            one
            for name, text in distinct_strings(values)
            if text != content_id
            for one in self._findings.values_of(text, "" if name == "text" else name)
        ]
        self._findings.count(found)
        if content_id not in self._segments:
            self._segments[content_id] = _Segment(_edges(values), values.get("role") is not None, found)
            if found:
                self._unplaced.add(content_id)

    def _add_request(self, values: Mapping[str, Any]) -> None:
        self.records += 1
        request = f"request {masked_name(str(values['request']), self._findings.detectors)}"
        own = {name: below for name, below in values.items() if name not in _PROMPTS}
        detectors = self._findings.add(distinct_strings(own), request)
        numbers = count(1)
        for prompt in _prompts(values):
            parts = [self._placed(part, next(numbers)) for part in prompt]
            for part, placed in zip(prompt, parts, strict=True):
                detectors |= self._add_part(part, f"{request}, segment {placed.number}")
            for together in _spoken_together(parts) if values.get("chat") else [parts]:
                detectors |= self._add_cut(together, request)
        self._findings.count_record(detectors)

    def _add_part(self, part: Any, place: str) -> set[str]:
        if not (isinstance(part, str) and part in self._segments):
            return self._findings.add(distinct_strings({"": part}), place)
        found = self._segments[part].values
        if part in self._unplaced:
            self._unplaced.remove(part)
            self._findings.give_examples(found, place)
        return {one.detector for one in found}

    def _placed(self, part: Any, number: int) -> _Part:
        if isinstance(part, str) and part in self._segments:
            segment = self._segments[part]
            return _Part(number, f"segment {part}", segment.edges, segment.begins_message)
        inline = part if isinstance(part, dict) else {}
        return _Part(number, f"text {_text(inline)}", _edges(inline), inline.get("role") is not None)

    def _add_cut(self, parts: Sequence[_Part], request: str) -> set[str]:
        """Values that borders between segments cut: no segment has them, and the prompt does."""
        detectors: set[str] = set()
        names = [part.key for part in parts]
        for stretch in stretches(part.edges for part in parts):
            key = stretch_digest(stretch, names)
            if key not in self._cut:
                cuts = cut_values(stretch, self._findings.hits)
                self._cut[key] = frozenset(cut.detector for cut in cuts)
                for cut in cuts:
                    first, last = (parts[cut.parts[at][0]].number for at in (0, -1))
                    found = [value(cut.detector, cut.value)]
                    self._findings.count(found)
                    self._findings.give_examples(found, f"{request}, segments {first} to {last}")
            detectors |= self._cut[key]
        return detectors


def _edges(values: Mapping[str, Any]) -> Edges:
    return edges(_text(values))


def _text(values: Mapping[str, Any]) -> str:
    text = values.get("text")
    return text if isinstance(text, str) else ""


def _prompts(values: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """The prompt, then the preludes; what is no list is looked at all the same."""
    segments, prelude = (values.get(name) for name in _PROMPTS)
    yield segments if isinstance(segments, list) else [segments]
    for prompt in prelude if isinstance(prelude, list) else [prelude]:
        yield prompt if isinstance(prompt, list) else [prompt]


def _spoken_together(parts: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """The messages of a chat."""
    starts = [at for at, part in enumerate(parts) if part.begins_message or not at]
    for start, end in zip(starts, [*starts[1:], len(parts)], strict=True):
        yield parts[start:end]
