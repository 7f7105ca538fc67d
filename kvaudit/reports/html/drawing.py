"""Figures as SVG that stands inside the page, takes its colours from the page's style and is the same every time.

matplotlib draws with placeholder colours; in the finished SVG each becomes a CSS variable, so that a figure follows
the light and the dark page alike.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from kvaudit.reports.html.parts import Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 400
"""Of every figure, in SVG units: what a phone shows at nearly full size."""
TEXT_SIZE, SMALL_SIZE = 12, 11
INK, SOFT, LINE, PAPER, PANEL = "#010100", "#010101", "#010102", "#010103", "#010104"
_ROLES = {INK: "ink", SOFT: "soft", LINE: "line", PAPER: "paper", PANEL: "panel"}
_SERIES = tuple(f"#0202{index:02x}" for index in range(7))
_VARIABLES = {**_ROLES, **{colour: f"s{index}" for index, colour in enumerate(_SERIES)}}
_OUTLINES = {
    "o": "M4 0A4 4 0 1 1-4 0A4 4 0 1 1 4 0Z",
    "s": "M-3.5-3.5H3.5V3.5H-3.5Z",
    "^": "M0-4L4 3.5H-4Z",
    "D": "M0-4.6L4.6 0L0 4.6L-4.6 0Z",
    "v": "M0 4L4-3.5H-4Z",
    "P": "M-1.5-4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "X": "M0-2L2-4L4-2L2 0L4 2L2 4L0 2L-2 4L-4 2L-2 0L-4-2L-2-4Z",
}
_MARKERS = tuple(_OUTLINES)
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "font.size": TEXT_SIZE,
    "axes.labelsize": SMALL_SIZE,
    "xtick.labelsize": SMALL_SIZE,
    "ytick.labelsize": SMALL_SIZE,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "lines.markersize": 5.5,
    "hatch.color": SOFT,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_HEAD = re.compile(r"^.*?(?=<svg)|<style.*?</style>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_OWN_NAME = re.compile(r'(\bid="|href="#|url\(#)')
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")


class Mark(NamedTuple):
    """How a series looks: a placeholder colour, a matplotlib marker, filled or hollow."""

    colour: str
    marker: str
    hollow: bool = False

    @property
    def face(self) -> str:
        return PAPER if self.hollow else self.colour


def policy_mark(index: int) -> Mark:
    return Mark(_SERIES[index % len(_SERIES)], _MARKERS[index % len(_MARKERS)])


def order_mark(index: int) -> Mark:
    """Orders differ in shape; the first, chronological, is filled."""
    return Mark(INK, _MARKERS[index % len(_MARKERS)], hollow=index > 0)


def key(label: str, mark: Mark) -> Key:
    return Key(label, _VARIABLES[mark.colour], _OUTLINES[mark.marker], mark.hollow)


def drawn(name: str, height: float, paint: Callable[[Axes], None], summary: str) -> Markup:
    """The SVG of what `paint` puts on axes. `name` is unique on the page and in front of every id, `summary` its
    accessible name."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    with _styled(name):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure.add_subplot())
        figure.savefig(out, format="svg", metadata=_NO_METADATA)
    return _inlined(out.getvalue(), name, height, summary)


@contextmanager
def _styled(salt: str) -> Iterator[None]:
    import matplotlib.style

    with matplotlib.style.context(["default", {**_STYLE, "svg.hashsalt": salt}]), warnings.catch_warnings():
        # Names may be in any script: the reader's browser has fonts that matplotlib's measuring lacks.
        warnings.filterwarnings("ignore", message="Glyph ")
        yield


def _inlined(svg: str, name: str, height: float, summary: str) -> Markup:
    body = _TAG.sub(lambda tag: _in_tag(tag.group(), name), _HEAD.sub("", svg))
    opening = Markup('<svg role="img" aria-label="{}" viewBox="0 0 {} {:.0f}">').format(summary, WIDTH, height)
    return opening + Markup(re.sub(r"\s*\n\s*", " ", body.partition(">")[2]).strip())


def _in_tag(tag: str, name: str) -> str:
    """Only tags are edited: a name or a number between them may look like a colour."""
    tag = _OWN_NAME.sub(rf"\g<1>{name}-", _FONT_FAMILY.sub("", tag)).replace("base64,\n", "base64,")
    return _COLOUR.sub(lambda found: _variable(found.group()), tag)


def _variable(colour: str) -> str:
    return f"var(--{_VARIABLES[colour]})" if colour in _VARIABLES else colour
