"""Shares over the trace as one strip of characters a series: readable without colour, 80 columns wide at most."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ZERO = "."
DIGITS = "0123456789"


def strip(shares: Sequence[float], ascii_only: bool = False) -> str:
    """One character a share: a bar of eighths, or the tens of the percentage; nothing at all is a dot."""
    levels = DIGITS if ascii_only else BLOCKS
    return "".join(_level(share, levels) for share in shares)


def _level(share: float, levels: str) -> str:
    return ZERO if share <= 0 else levels[min(len(levels) - 1, int(share * len(levels)))]


def axis(requests: int, width: int) -> str:
    """The numbers of the first and last request under a strip."""
    last = f"{requests:,}"
    return "1" if requests < 2 or width < len(last) + 2 else "1" + last.rjust(width - 1)
