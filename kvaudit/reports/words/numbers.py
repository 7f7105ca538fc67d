"""Shares, intervals, p-values, counts and names as text, the same in every format."""

from __future__ import annotations

from collections.abc import Sequence

from kvaudit.analysis.figures import Figure
from kvaudit.analysis.stats import Estimate
from kvaudit.reports.escape import visible

MOST_NAMES = 3


def percent(share: float | None, digits: int = 1) -> str:
    """A share in percent; what is not quite nothing or everything never reads as if it were."""
    if share is None:
        return "-"
    shown, step = f"{100 * share:.{digits}f}", 10**-digits
    if 0 < share < 1 and float(shown) in (0, 100):
        return f"<{step:.{digits}f} %" if float(shown) == 0 else f">{100 - step:.{digits}f} %"
    return f"{shown} %"


def interval(figure: Figure | Estimate, digits: int = 1) -> str:
    """A share's 95 % interval in percent."""
    if figure.low is None or figure.high is None:
        return "-"
    return f"{100 * figure.low:.{digits}f} to {100 * figure.high:.{digits}f}"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def small(value: float | None) -> str:
    """A number of any size in four characters or so of significance."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def points(share: float | None) -> str:
    """A difference of two shares in percentage points, with its sign."""
    return "-" if share is None else f"{100 * share:+.1f}"


def p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return "<0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def names(items: Sequence[str], most: int = MOST_NAMES) -> str:
    """The first few names, made harmless, and how many more there are."""
    shown = ", ".join(visible(item) for item in items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def counted(count: int | None, noun: str) -> str:
    return f"{count or 0:,} {noun}" + ("" if count == 1 else "s")


def in_blocks(block: int) -> str:
    """How requests that share content were counted; nothing where each counts for itself."""
    return f" (requests counted in blocks of {block}, since their windows overlap)" if block > 1 else ""
