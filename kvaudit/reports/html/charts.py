"""The kinds of charts on the page, each from plain numbers to SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from kvaudit.analysis.compare import DIFFERENT, NOT_COMPARABLE
from kvaudit.reports.html.drawing import INK, LINE, PANEL, PAPER, SMALL_SIZE, SOFT, Mark, drawn
from kvaudit.reports.html.parts import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

ROW, HEADER, AXIS = 15, 26, 48
"""Heights in SVG units: of a point's row, of the line that names a group, of the axis below."""
LONGEST_LABEL, LONGEST_TICK = 48, 16
MOST_COLUMNS = 400
"""Of a heat map: more would be narrower than a pixel."""
FLIP, UNKNOWN = (213, 94, 0), (128, 128, 128)
FAINTEST, UNKNOWN_ALPHA = 70, 110
"""Opacity (of 255) of a column in which one of many requests differs, and of one without a comparable request."""
CURVE_POINTS = 101
MOST_BINS = 12


class Point(NamedTuple):
    """A value with its interval, in the unit of the axis; `note` stands at the right edge."""

    mark: Mark
    value: float
    low: float | None
    high: float | None
    note: str = ""


class Group(NamedTuple):
    label: str
    points: Sequence[Point]


class Curve(NamedTuple):
    """x and y of a line; `low` and `high` bound a band around it."""

    mark: Mark
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    dashed: bool = False


def forest(name: str, groups: Sequence[Group], axis: str, summary: str, bounds: tuple[float, float] | None) -> Markup:
    """Points with intervals, a row each, under the name of their group. Without `bounds` the axis marks zero."""
    rows = sum(len(group.points) for group in groups)
    height = AXIS + HEADER * len(groups) + ROW * rows

    def paint(axes: Axes) -> None:
        place = 0.0
        for group in groups:
            label = short(group.label, LONGEST_LABEL)
            _heading(axes, label, place + HEADER * 0.62)
            place += HEADER
            for point in group.points:
                _whisker(axes, point, place + ROW / 2)
                place += ROW
        axes.set_ylim(place, 0)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.set_xlabel(axis)
        if bounds is None:
            axes.axvline(0, color=SOFT, linewidth=1, zorder=1)
        else:
            margin = 0.015 * (bounds[1] - bounds[0])
            axes.set_xlim(bounds[0] - margin, bounds[1] + margin)

    return drawn(name, height, paint, summary)


def bars(name: str, edges: Sequence[str], series: Sequence[tuple[Mark, Floats]], axis: str, summary: str) -> Markup:
    """Counts per bin, the series side by side. `edges` names the bins."""
    from matplotlib.ticker import MaxNLocator

    def paint(axes: Axes) -> None:
        width = 0.8 / len(series)
        places = np.arange(len(edges))
        for index, (mark, counts) in enumerate(series):
            axes.bar(places - 0.4 + width * (index + 0.5), counts, width * 0.92, color=mark.colour)
        _few_labels(axes, edges)
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(axis)
        axes.set_ylabel("answers")

    return drawn(name, 210, paint, summary)


def curves(
    name: str, lines: Sequence[Curve], axes_names: tuple[str, str], summary: str, *, logarithmic: bool = False
) -> Markup:
    """Lines, with bands around them where there are any; y is a share in percent, x counts unless `logarithmic`."""
    from matplotlib.ticker import MaxNLocator

    def paint(axes: Axes) -> None:
        for index, line in enumerate(lines):
            if line.low is not None and line.high is not None:
                axes.fill_between(line.x, line.low, line.high, color=line.mark.colour, alpha=0.15, linewidth=0)
            _line(axes, line, index, len(lines))
        if logarithmic:
            _logarithmic(axes)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(-3, 103)
        axes.grid()
        axes.set_xlabel(axes_names[0])
        axes.set_ylabel(axes_names[1])

    return drawn(name, 230, paint, summary)


def scatter(
    name: str, points: Sequence[tuple[Mark, float, float]], axes_names: tuple[str, str], summary: str
) -> Markup:
    """Points (mark, x, y); y is a share in percent, x is logarithmic where it spans more than a decade."""

    def paint(axes: Axes) -> None:
        for mark, x, y in points:
            axes.plot(x, y, mark.marker, color=mark.colour, markerfacecolor=mark.face, markersize=7, clip_on=False)
        xs = [x for _, x, _ in points]
        if min(xs) > 0 and max(xs) > 10 * min(xs):
            axes.set_xlim(min(xs) / 1.5, max(xs) * 1.5)
            _logarithmic(axes)
        else:
            axes.set_xlim(0, 1.1 * max(xs) or 1)
        axes.set_ylim(0, 103)
        axes.grid()
        axes.set_xlabel(axes_names[0])
        axes.set_ylabel(axes_names[1])

    return drawn(name, 230, paint, summary)


def heat_map(name: str, rows: Sequence[str], agreement: NDArray[np.int8], summary: str) -> Markup:
    """Arms (rows) by requests: `agreement` int8 [A, R] as `analysis.compare.agreement` gives it."""
    from matplotlib.ticker import MaxNLocator

    image = painted(columns_of(agreement))
    count, columns = image.shape[:2]

    def paint(axes: Axes) -> None:
        axes.set_facecolor(PANEL)
        requests = agreement.shape[1]
        extent = (0.5, 0.5 + columns * requests_a_column(requests), count, 0)
        axes.imshow(image, interpolation="none", extent=extent, aspect="auto")
        for row in range(1, count):
            axes.axhline(row, color=PAPER, linewidth=2.5)
        if requests <= 40:
            for request in range(1, requests):
                axes.axvline(request + 0.5, color=PAPER, linewidth=1)
        axes.set_xlim(0.5, requests + 0.5)
        axes.set_yticks(np.arange(count) + 0.5, [short(row, LONGEST_TICK) for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("request, in the order in which they came")
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)

    return drawn(name, AXIS + 19 * count, paint, summary)


def requests_a_column(requests: int) -> int:
    return max(1, math.ceil(requests / MOST_COLUMNS))


def columns_of(agreement: NDArray[np.int8]) -> Floats:
    """Per arm and column the share of comparable requests that differ: float64 [A, C], NaN where none compares."""
    arms, requests = agreement.shape
    size = requests_a_column(requests)
    padded = np.full((arms, math.ceil(requests / size) * size), NOT_COMPARABLE, np.int8)
    padded[:, :requests] = agreement
    cells = padded.reshape(arms, -1, size)
    differing = (cells == DIFFERENT).sum(axis=2)
    comparable = (cells != NOT_COMPARABLE).sum(axis=2)
    return np.where(comparable > 0, differing / np.maximum(comparable, 1), np.nan)


def painted(shares: Floats) -> NDArray[np.uint8]:
    """Shares as pixels: uint8 [A, C, 4]. One colour whose opacity is the share, so that it shows on light and dark."""
    pixels = np.zeros((*shares.shape, 4), np.uint8)
    differs = np.nan_to_num(shares) > 0
    pixels[differs, :3] = FLIP
    pixels[differs, 3] = np.ceil(FAINTEST + (255 - FAINTEST) * shares[differs])
    pixels[np.isnan(shares)] = (*UNKNOWN, UNKNOWN_ALPHA)
    return pixels


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """Quantiles of the values and the percentages that lie below them: a curve of the same size for any number."""
    shares = np.linspace(0, 1, min(CURVE_POINTS, max(2, len(values))))
    return np.quantile(values, shares), 100 * shares


def _heading(axes: Axes, label: str, place: float) -> None:
    """A group's name at the left edge, over the grid, and never a reason to make the axes narrower."""
    ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
    text = axes.text(0, place, label, transform=axes.get_yaxis_transform(), va="center", bbox=ground)
    text.set_in_layout(False)


def _whisker(axes: Axes, point: Point, place: float) -> None:
    mark = point.mark
    if point.low is not None and point.high is not None:
        axes.plot([point.low, point.high], [place, place], color=mark.colour, linewidth=1.6, solid_capstyle="butt")
        axes.plot([point.low, point.high], [place, place], "|", color=mark.colour, markersize=5)
    axes.plot(point.value, place, mark.marker, color=mark.colour, markerfacecolor=mark.face)
    if point.note:
        axes.text(
            1.02, place, point.note, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL_SIZE, color=INK
        )


def _line(axes: Axes, line: Curve, index: int, lines: int) -> None:
    """Lines may lie on each other: the lower ones are wider, and the marks of each stand elsewhere."""
    every = max(1, len(line.x) // 5)
    axes.plot(
        line.x,
        line.y,
        color=line.mark.colour,
        marker=line.mark.marker,
        markevery=(index * every // lines, every),
        linestyle="--" if line.dashed else "-",
        linewidth=1.5 + 1.2 * (lines - 1 - index if line.low is not None else 0),
        markerfacecolor=PAPER if line.dashed else line.mark.face,
    )


def _logarithmic(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < 10 * low:  # else no round number might lie between
        low, high = axes.set_xlim(low / 3, high * 3)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _few_labels(axes: Axes, labels: Sequence[str]) -> None:
    step = math.ceil(len(labels) / MOST_BINS)
    axes.set_xticks(np.arange(0, len(labels), step), list(labels[::step]))
    axes.tick_params(axis="x", length=0, color=LINE)
