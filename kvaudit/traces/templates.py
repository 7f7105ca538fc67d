"""How a row of an event table becomes text: `{column}` stands for the row's value, and nothing else is evaluated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter

from kvaudit.errors import UsageError
from kvaudit.traces.tables import Table

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
_CHANNEL = re.compile(r"([^{}=\s]+)=(.*)", re.DOTALL)
_HINT = "{column} takes the row's value, {{ and }} are braces"


def unescape(text: str) -> str:
    r"""`\n`, `\t`, `\r` and `\\` as the characters that they name; every other backslash stays."""
    return re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], text)


@dataclass(frozen=True, slots=True)
class Template:
    """Pairs of (text, column that follows it or None)."""

    parts: tuple[tuple[str, str | None], ...]

    def render(self, row: Mapping[str, str]) -> str:
        return "".join(text if column is None else text + row[column] for text, column in self.parts)

    @property
    def columns(self) -> list[str]:
        return [column for _, column in self.parts if column is not None]


def parse_template(text: str, option: str) -> Template:
    """`text` with escapes. Raises UsageError, naming the option, for anything but plain column names in braces."""
    try:
        parsed = list(Formatter().parse(unescape(text)))
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no template: {error}", _HINT) from error
    for _, column, spec, conversion in parsed:
        if column == "":
            raise UsageError(f"{option} {text!r} has braces without a column in them", _HINT)
        if spec or conversion:
            raise UsageError(f"{option} {text!r} has more than a column name in its braces", _HINT)
    return Template(tuple((literal, column) for literal, column, _, _ in parsed))


class ChannelTemplates:
    """The values of one option: at most one template for all channels, and `CHANNEL=TEMPLATE` for single ones.

    With `channels` false, a value is a template whatever it begins with.
    """

    def __init__(self, option: str, values: Sequence[str], channels: bool) -> None:
        self._option = option
        self._default: Template | None = None
        self._by_channel: dict[str, Template] = {}
        for value in values:
            match = _CHANNEL.fullmatch(value) if channels else None
            if match:
                self._by_channel[match[1]] = parse_template(match[2], option)
            elif self._default is None:
                self._default = parse_template(value, option)
            else:
                hint = "write CHANNEL=TEMPLATE for single channels" if channels else "one channel has one template"
                raise UsageError(f"{option} is given twice", hint)

    def of(self, channel: str, table: Table) -> Template | None:
        """Raises UsageError for a template with a column that the table does not have."""
        template = self._by_channel.get(channel, self._default)
        for column in template.columns if template else ():
            table.require(column, self._option)
        return template

    def check_channels(self, channels: Sequence[str]) -> None:
        """Raises UsageError where a template is meant for a channel that did not occur."""
        for name in self._by_channel:
            if name not in channels:
                raise UsageError(
                    f"{self._option} has a template for the channel {name!r}, which does not occur",
                    f"channels: {', '.join(channels)}",
                )
