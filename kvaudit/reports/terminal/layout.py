"""How the terminal report looks: headings, indented sentences, plain tables, and which figure stands in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvaudit.analysis.figures import Figure, select
from kvaudit.reports.escape import visible
from kvaudit.reports.words.figures import place_condition

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

Place = tuple[str | None, str | None, str | None]
"""Policy, order and control."""


def heading(title: str) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, "bold")


def sentences(lines: Sequence[str], indent: int = 2) -> Iterator[RenderableType]:
    """Indented lines, made harmless."""
    for line in lines:
        yield Padding(Text(visible(line), overflow="fold"), (0, 0, 0, indent))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """A table with the first column aligned left, the others right. Every cell is made harmless."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), header_style="")
    made.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        made.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*(Text(visible(cell)) for cell in row))
    return made


def grouped_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """A table whose rows begin with their group's name and their own: each group gets a line, its rows are indented.

    `columns` names group and row together in its first entry.
    """
    arranged: list[Sequence[str]] = []
    group = None
    for row in rows:
        if row[0] != group:
            group = row[0]
            arranged.append([group, *[""] * (len(columns) - 1)])
        arranged.append([f"  {row[1]}", *row[2:]])
    return table(columns, arranged)


def place_of(figure: Figure) -> Place:
    return figure.policy, figure.order, figure.control


def condition(place: Place) -> str:
    return place_condition(place[1], place[2])


def figure_at(audit: Audit, metric: str, place: Place) -> Figure | None:
    return next(iter(select(audit.figures, metric, *place)), None)
