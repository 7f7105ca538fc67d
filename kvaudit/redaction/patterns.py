"""Patterns that users give, in the syntax of the `regex` package and with a limit on their time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import regex

from kvaudit.errors import UsageError
from kvaudit.redaction.detectors import Detector, Searched, Span

SECONDS = 5.0
"""That one pattern may take on one text."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")


def user_detectors(definitions: Iterable[str], taken: Iterable[str], seconds: float = SECONDS) -> list[Detector]:
    """Detectors of `NAME=REGEX` definitions. Raises UsageError for a name that is taken or no name, for a pattern that
    is broken or matches nothing at all.
    """
    names = set(taken)
    made = []
    for definition in definitions:
        name, equals, pattern = definition.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise UsageError(
                f"{definition!r:.80} is no pattern", "write NAME=REGEX, with letters, digits and - in the name"
            )
        if name.lower() in names:
            raise UsageError(f"there is a detector {name.lower()!r} already", "give the pattern another name")
        names.add(name.lower())
        made.append(Detector(name.lower(), _Pattern(name.lower(), pattern, seconds)))
    return made


class _Pattern:
    def __init__(self, name: str, pattern: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise UsageError(f"the pattern {name!r} is broken: {error}") from error
        list(self(Searched("", "")))  # refuses at once what matches no characters

    def __call__(self, searched: Searched) -> Iterator[Span]:
        try:
            for match in self._pattern.finditer(searched.raw, timeout=self._seconds):
                if match.start() == match.end():
                    raise UsageError(
                        f"the pattern {self._name!r} matches a text of no characters", "have it match at least one"
                    )
                yield match.span()
        except TimeoutError as error:
            raise UsageError(
                f"the pattern {self._name!r} takes longer than {self._seconds:g} s on a text of "
                f"{len(searched.raw):,} characters",
                "make it simpler: no repetition inside a repetition",
            ) from error
