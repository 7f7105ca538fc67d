"""Patterns that users give, in the syntax of the `regex` package and with a limit on their time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from time import perf_counter

import regex

from kvaudit.errors import UsageError
from kvaudit.redaction.detectors import Detector, Searched, Span

SECONDS = 5.0
"""That one pattern may take on one text."""
SECONDS_IN_ALL = 60.0
SECONDS_A_MILLION = 1.0
"""That one pattern may take on all texts together, and more for each million of their characters."""

_SHORTEST = 1e-3
_SIMPLER = "make it simpler: no repetition inside a repetition"
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
        self._left = SECONDS_IN_ALL
        try:
            self._pattern = regex.compile(pattern)
        except regex.error as error:
            raise UsageError(f"the pattern {name!r} is broken: {error}") from error
        except (MemoryError, RecursionError, OverflowError) as error:
            raise self._too_large() from error
        list(self(Searched("", "")))  # refuses at once what matches no characters

    def __call__(self, searched: Searched) -> Iterator[Span]:
        self._left += len(searched.raw) * SECONDS_A_MILLION / 1e6
        begun = perf_counter()
        try:
            for match in self._pattern.finditer(searched.raw, timeout=max(min(self._seconds, self._left), _SHORTEST)):
                if match.start() == match.end():
                    raise UsageError(
                        f"the pattern {self._name!r} matches a text of no characters", "have it match at least one"
                    )
                yield match.span()
        except TimeoutError as error:
            if self._left < self._seconds:
                raise UsageError(
                    f"the pattern {self._name!r} takes too long on all texts together", _SIMPLER
                ) from error
            raise UsageError(
                f"the pattern {self._name!r} takes longer than {self._seconds:g} s on a text of "
                f"{len(searched.raw):,} characters",
                _SIMPLER,
            ) from error
        except (MemoryError, RecursionError, OverflowError) as error:
            raise self._too_large() from error
        finally:
            self._left -= perf_counter() - begun

    def _too_large(self) -> UsageError:
        return UsageError(
            f"the pattern {self._name!r} needs more memory than there is", "it may call itself: write it without (?R)"
        )
