"""The strategies by name, and how they are written: `NAME` or `NAME:ARGUMENT`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvaudit.errors import UsageError

if TYPE_CHECKING:
    from kvaudit.segmenting.pieces import Prepare


@dataclass(frozen=True, slots=True)
class Known:
    """A line of the table. `argument` is what stands behind the colon, '' for nothing. `target` is loaded late.

    `nothing` says why it had nothing to do. `reads_parts`: it goes by the parts of contents as a log has them, so that
    nothing can come before it.
    """

    name: str
    argument: str
    target: str
    summary: str
    nothing: str = ""
    reads_parts: bool = False
    reads_tokens: bool = False

    @property
    def written(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


_NO_LIST = "no JSON list of two or more objects, lists or strings was found"

KNOWN = (
    Known("message", "", "merging:message", "a segment a message: its parts are joined (the default)"),
    Known(
        "part",
        "",
        "merging:part",
        "a segment a part of a message's content",
        "no message has several parts",
        reads_parts=True,
    ),
    Known(
        "tool-result",
        "",
        "merging:tool_result",
        "parts of tools' results; others are joined",
        "no tool's result has several parts",
        reads_parts=True,
    ),
    Known(
        "separator",
        "TEXT",
        "separators:separator",
        r"documents between a text; \n and \t are escapes",
        "the text stands nowhere",
    ),
    Known(
        "pattern",
        "REGEX",
        "patterns:pattern",
        "a document a match; . matches line ends too",
        "the pattern matches nothing",
    ),
    Known("json", "", "json_items:json_items", "a document an item of a JSON list", _NO_LIST),
    Known("tokens", "N", "fixed:tokens", "segments of N tokens", "no text has more tokens", reads_tokens=True),
    Known("auto", "", "recurring:recurring", "documents that recur inside messages, by tokens", reads_tokens=True),
)
_BY_NAME = {known.name: known for known in KNOWN}


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy as it was `written`."""

    written: str
    known: Known
    prepare: Prepare


def parse_strategies(written: Sequence[str]) -> tuple[Strategy, ...]:
    """Raises UsageError for an unknown strategy, a wrong argument, and one that has to come first and does not."""
    strategies = tuple(map(_parsed, written))
    for strategy in strategies[1:]:
        if strategy.known.reads_parts:
            raise UsageError(
                f"the strategy {strategy.written!r} goes by parts that the ones before it may have joined or cut",
                "give it first",
            )
    return strategies


def _parsed(written: str) -> Strategy:
    name, colon, argument = written.partition(":")
    known = _BY_NAME.get(name)
    if known is None:
        raise UsageError(f"unknown strategy {written!r}", f"known: {', '.join(each.written for each in KNOWN)}")
    if known.argument and not argument:
        raise UsageError(f"the strategy {name!r} needs {known.argument}", f"write {known.written}")
    if colon and not known.argument:
        raise UsageError(f"the strategy {name!r} takes nothing behind a colon", f"write {name}")
    module, _, attribute = known.target.partition(":")
    make: Any = getattr(import_module(f"kvaudit.segmenting.{module}"), attribute)
    return Strategy(written, known, make(argument) if known.argument else make())
