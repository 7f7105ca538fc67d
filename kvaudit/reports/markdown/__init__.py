"""The audit for a comment on a pull request or a step summary: verdict first, long lists folded and cut to fit.

Lists are cut at whole rows and say how many there are; totals and figures are those of the whole audit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from kvaudit.reports.markdown.baseline import baseline_lists
from kvaudit.reports.markdown.figures import figure_blocks
from kvaudit.reports.markdown.layout import arranged
from kvaudit.reports.markdown.lists import changing_requests, settings_in_force, worst_requests
from kvaudit.reports.markdown.verdict import verdict_blocks

if TYPE_CHECKING:
    from kvaudit.analysis.audit import Audit

COMMENT_LIMIT = 64_000
"""Bytes of a comment. GitHub takes 65,536 characters."""
SUMMARY_LIMIT = 1_000_000
"""Bytes of a step summary. GitHub takes 1,024 KiB a step, whatever else the step writes included."""


def render(audit: Audit, out: TextIO) -> None:
    """Write the report to `out`, short enough for a comment on a pull request."""
    out.write(markdown(audit))


def markdown(audit: Audit, limit: int = COMMENT_LIMIT) -> str:
    """The report as GitHub-flavoured markdown in at most `limit` bytes of UTF-8, ended by a line feed.

    Empty where there is room for nothing.
    """
    lists = [
        *changing_requests(audit, limit),
        *worst_requests(audit, limit),
        *settings_in_force(audit, limit),
        *baseline_lists(audit, limit),
    ]
    return arranged([*verdict_blocks(audit), *figure_blocks(audit)], lists, limit)
