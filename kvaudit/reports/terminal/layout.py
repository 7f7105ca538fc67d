"""How the terminal report looks: headings, indented sentences, plain tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvaudit.reports.escape import visible


def heading(title: str) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, "bold")


def sentences(lines: Sequence[str], indent: int = 2) -> Iterator[RenderableType]:
    for line in lines:
        yield Padding(Text(line, overflow="fold"), (0, 0, 0, indent))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric_from: int = 1) -> RenderableType:
    """A table whose columns from `numeric_from` on are aligned right. Every cell is made harmless.

    A first column that repeats the row above is left blank, so that rows of one policy read as a group.
    """
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), header_style="")
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index >= numeric_from else "left", overflow="fold")
    previous = None
    for row in rows:
        first = "" if row[0] == previous and numeric_from > 1 else row[0]
        previous = row[0]
        made.add_row(*(Text(visible(cell)) for cell in (first, *row[1:])))
    return made
