"""How the markdown report looks: foreign text in code spans, tables, and blocks that are cut at whole rows.

Foreign text stands in code spans: there neither markdown nor HTML nor GitHub's mentions, references and links work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from kvaudit.reports.escape import excerpt

LONGEST_NAME = 120
LONGEST_SENTENCE = 1_200
PLAIN_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
PLAIN_NUMBER = re.compile(r"[<>]?[+-]?\d[\d,]*(?:\.\d+)?|%")
COMPARING = frozenset("-=<>")
EDGES = re.compile(r"(\(?)(.*?)([.,:;)]*)", re.DOTALL)


def code(text: str, around: int = 0, length: int = LONGEST_NAME) -> str:
    """Foreign text as a code span on one line, cut to `length` characters from a little before `around`."""
    shown = excerpt(text, around, length) if text else ""
    if not shown:
        return "(empty)"
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    # A span drops one space at either end when it has both, and its fence must not touch a backtick.
    padded = shown[0] == "`" or shown[-1] == "`" or (shown[0] == shown[-1] == " " and shown.strip(" "))
    return f"{fence} {shown} {fence}" if padded else f"{fence}{shown}{fence}"


def cell(text: str | None) -> str:
    """Foreign text in a table."""
    return in_cell(code(text)) if text else ""


def in_cell(markdown: str) -> str:
    """Markdown on one line for a table, where a pipe ends the cell even in a code span."""
    # Parsers disagree on what a backslash before an escaped pipe means, so such a pipe is shown as its escape.
    return markdown.replace(r"\|", r"\\x7c").replace("|", r"\|")


def prose(sentence: str) -> str:
    """A sentence of `reports.words`: plain words and numbers as they are, anything else as code."""
    cut = sentence if len(sentence) <= LONGEST_SENTENCE else f"{sentence[:LONGEST_SENTENCE]} ..."
    return " ".join(_word(word, first=index == 0) for index, word in enumerate(cut.split()))


def _word(word: str, *, first: bool) -> str:
    """The first word of a paragraph could begin a list ('-', '1.') or underline a heading ('=')."""
    match = EDGES.fullmatch(word)
    before, middle, after = match.groups() if match else ("", word, "")
    is_number = PLAIN_NUMBER.fullmatch(middle) and not (first and after)
    if PLAIN_WORD.fullmatch(middle) or is_number or (word in COMPARING and not first):
        return escape(word, quote=False)
    return f"{before}{code(middle)}{after}" if middle else code(word)


def table_head(columns: Sequence[str], names: int) -> str:
    """The first two lines of a table whose first `names` columns hold text and the others numbers."""
    rule = ["---"] * names + ["---:"] * (len(columns) - names)
    return f"{_row(columns)}\n{_row(rule)}"


def table_row(names: Sequence[str | None], values: Sequence[str] = ()) -> str:
    """A row of foreign names, then values that are our own."""
    return _row([*(cell(name) for name in names), *(escape(value, quote=False) for value in values)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the report. It is cut at whole rows; head and tail always stand.

    `total` counts the rows that there are, of which `rows` may hold only the first; `noun` says what they are.
    """

    head: str
    rows: tuple[str, ...] = ()
    total: int = 0
    noun: str = ""
    tail: str = ""

    def text(self, shown: int) -> str:
        """The block with its first rows, ended by a line feed."""
        return self._assembled(self.rows[:shown], shown if shown < self.total else None)

    def whole(self) -> int:
        """Bytes of the block with all the rows that it holds."""
        return size(self.text(len(self.rows)))

    def shortest(self) -> int:
        """Bytes without which nothing of the block can be shown."""
        return min(self.whole(), self._bare()) if self.rows else self.whole()

    def cut(self, room: int) -> str:
        """The block with as many rows as fit into `room` bytes, which are at least `shortest`."""
        if self.whole() <= room:
            return self.text(len(self.rows))
        spare = room - self._bare()
        return self.text(sum(used <= spare for used in accumulate(size(row) + 1 for row in self.rows)))

    def _bare(self) -> int:
        """Bytes of all but the rows, with the longest note on what is left out."""
        return size(self._assembled((), self.total))

    def _assembled(self, rows: Sequence[str], shown: int | None) -> str:
        parts = [self.head, *rows]
        if shown is not None:
            listed = f"the first {shown:,} are listed" if shown else "none is listed"
            parts += ["", f"{self.total:,} {self.noun}; {listed}."]
        if self.tail:
            parts += ["", self.tail]
        return "".join(f"{part}\n" for part in parts)


def size(text: str) -> int:
    return len(text.encode())


def folded(summary: str, rows: Iterable[str], total: int, noun: str, limit: int) -> Block:
    """A list that opens on a click. `summary` is HTML; no more rows are taken from `rows` than `limit` bytes hold."""
    head = f"<details>\n<summary>{summary}</summary>\n"
    return Block(head, tuple(_first(rows, limit)), total, noun, "</details>")


def html_code(text: str) -> str:
    """Foreign text in the HTML of a summary."""
    return f"<code>{escape(excerpt(text, length=LONGEST_NAME))}</code>"


def _first(rows: Iterable[str], limit: int) -> Iterator[str]:
    used = 0
    for row in rows:
        used += size(row) + 1
        if used > limit:
            return
        yield row


def arranged(essential: Sequence[Block], lists: Sequence[Block], limit: int) -> str:
    """The blocks in at most `limit` bytes: those that are essential first, the lists with what they leave.

    Blocks are dropped from the end, and said to be, only where not even their heads fit; nothing is left of a text
    that would only say so and does not fit either.
    """
    blocks = [*essential, *lists]
    note = "{} further parts did not fit.\n"
    room = limit - size(note.format(len(blocks))) - 1
    fitting = sum(used <= room for used in accumulate(block.shortest() + 1 for block in blocks))
    essential, lists = essential[:fitting], lists[: max(0, fitting - len(essential))]
    reserved = sum(block.shortest() + 1 for block in lists)
    texts = _cut(essential, room - reserved)
    texts += _cut(lists, room - sum(size(text) + 1 for text in texts))
    if fitting < len(blocks):
        texts.append(note.format(len(blocks) - fitting))
    text = "\n".join(texts)
    return text if size(text) <= limit else ""


def _cut(blocks: Sequence[Block], room: int) -> list[str]:
    """The blocks cut so that small ones stay whole and large ones share alike what is left."""
    spare = room - sum(block.shortest() + 1 for block in blocks)
    wanted = [block.whole() - block.shortest() for block in blocks]
    texts = [""] * len(blocks)
    for done, index in enumerate(sorted(range(len(blocks)), key=wanted.__getitem__)):
        block = blocks[index]
        granted = min(wanted[index], spare // (len(blocks) - done))
        texts[index] = block.cut(block.shortest() + granted)
        spare -= size(texts[index]) - block.shortest()
    return texts
