"""What is left out of a log: counted by its reason, with the first places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_PLACES_SHOWN = 3
_MOST_REASONS = 30
_OTHER_REASONS = "for other reasons"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A record of a log that is no request to replay. `place` is its line, row or entry."""

    place: int
    reason: str
    detail: str = ""


class Tally:
    """What was left out. `unit` is what a place counts; `notes` are on the whole log."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.notes: list[str] = []
        self._rows: dict[str, dict[str, Any]] = {}

    def add(self, left_out: LeftOut) -> None:
        reason = left_out.reason
        if reason not in self._rows and len(self._rows) >= _MOST_REASONS:
            reason = _OTHER_REASONS
        row = self._rows.setdefault(reason, {"reason": reason, "count": 0, "places": []})
        row["count"] += 1
        if len(row["places"]) < _PLACES_SHOWN:
            detail = f" ({left_out.detail})" if left_out.detail else ""
            row["places"].append(f"{self.unit} {left_out.place}{detail}")

    def rows(self) -> list[dict[str, Any]]:
        """`{"reason", "count", "places"}`, the most frequent reason first."""
        return sorted(self._rows.values(), key=lambda row: -row["count"])

    @property
    def total(self) -> int:
        return sum(row["count"] for row in self._rows.values())


def told_left_out(row: dict[str, Any]) -> str:
    """A row of a tally as a line of text."""
    more = row["count"] - len(row["places"])
    places = ", ".join(row["places"]) + (f" and {more:,} more" if more else "")
    return f"{row['count']:,} {row['reason']}: {places}"
