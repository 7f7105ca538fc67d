"""What the page is made of: sections of sentences, pictures, tables and exhibits. The template knows only these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from kvaudit.reports.escape import visible
from kvaudit.reports.words.numbers import counted

MOST_ROWS = 100
OPEN_ROWS = 14
"""Longer tables are folded."""
LONGEST_NAME = 80


class Key(NamedTuple):
    """An entry of a picture's legend: its name, its colour (a CSS class) and the outline of its mark (an SVG path)."""

    label: str
    tone: str
    outline: str
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure. `reading` says how to read it, `summary` is its text for those who do not see it."""

    name: str
    title: str
    reading: str
    summary: str
    svg: Markup
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; the first `labels` columns name the row, the others hold numbers. `more`: rows left out.
    `aside`: folded however short it is."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    labels: int = 1
    more: int = 0
    aside: bool = False

    @property
    def size(self) -> str:
        return counted(len(self.rows) + self.more, "row")

    @property
    def folded(self) -> bool:
        return self.aside or len(self.rows) > OPEN_ROWS


class Quote(NamedTuple):
    """An answer: who gave it, what it shares with full prefill's, the rest, and facts about it."""

    source: str
    shared: str
    rest: str
    facts: str = ""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One request with its answers, and where the reused KV of the damaged one came from."""

    title: str
    quotes: tuple[Quote, ...]
    notes: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    title: str
    lead: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def titled(self) -> bool:
        """Whether its tables need titles of their own."""
        return len(self.tables) > 1 or bool(self.pictures)

    @property
    def empty(self) -> bool:
        return not (self.pictures or self.tables or self.exhibits or self.notes)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), labels: int = 1
) -> list[Table]:
    """A table cut to its first `MOST_ROWS` rows; none where there is no row."""
    if not rows:
        return []
    shown = tuple(tuple(row) for row in rows[:MOST_ROWS])
    return [Table(title, tuple(columns), shown, tuple(notes), labels, max(0, len(rows) - MOST_ROWS))]


def short(name: str | None, length: int = LONGEST_NAME) -> str:
    """A foreign name on one line, harmless and not longer than a label may be."""
    text = visible((name or "")[: length + 1])
    return text if len(text) <= length else f"{text[: length - 3]}..."


def listed(items: Sequence[str], most: int) -> str:
    """Key numbers as one line, with how many more there are."""
    more = f"; and {len(items) - most} more in the table" if len(items) > most else ""
    return "; ".join(items[:most]) + more
