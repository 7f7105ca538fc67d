"""A study as data: one JSON object with stable keys, UTF-8, undefined numbers as null.

`report_version` counts changes of this layout. `rows` has an entry for each policy of each cell, `explained` one for
each analysis of deviance; what each value is: kvaudit.study.results and kvaudit.analysis.deviance.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from kvaudit import __version__
from kvaudit.analysis.stats import Estimate
from kvaudit.reports.study.words import explained_sentence, headline
from kvaudit.reports.words.findings import reason_sentence

if TYPE_CHECKING:
    from kvaudit.analysis.frontier import Standing
    from kvaudit.study.results import Row, StudyResults

REPORT_VERSION = 1


def render(results: StudyResults, out: TextIO) -> None:
    """Write the study to `out` as indented JSON."""
    out.write(orjson.dumps(as_data(results), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


def as_data(results: StudyResults) -> dict[str, Any]:
    described = results.described
    kept = ("schema_version", "kind", "trace", "settings", "engine", "axes", "same", "skipped", "refused")
    return {
        "report_version": REPORT_VERSION,
        "kvaudit_version": __version__,
        **{name: described[name] for name in kept},
        "exit_code": results.exit_code,
        "headline": headline(results),
        "missing": list(results.missing),
        "unreadable": dict(results.unreadable),
        "failed": [failure._asdict() for failure in results.failed],
        "rows": [_row(row, standing) for row, standing in zip(results.rows, results.standing, strict=True)],
        "explained": [
            {
                "policy": explained.policy,
                "event": explained.event,
                "sentence": explained_sentence(explained),
                **asdict(explained.deviance),
            }
            for explained in results.explained
        ],
    }


def _row(row: Row, standing: Standing) -> dict[str, Any]:
    return {
        "cell": row.cell.name,
        "policy": row.policy,
        "recompute_ratio": row.cell.recompute_ratio,
        "switches": asdict(row.cell.switches),
        "standing": standing,
        "seen": row.finding.seen,
        "reasons": [{**asdict(reason), "sentence": reason_sentence(reason)} for reason in row.finding.reasons],
        "is_control": row.cell.is_control,
        "fidelity": _estimate(row.fidelity),
        "mean_fidelity": _estimate(row.mean_fidelity),
        "answer_variation": _estimate(row.variation),
        "ttft_speedup": _estimate(row.speedup),
        "ttft_ms": row.ttft_ms,
        "kl": row.kl,
        "fragmentation": row.runs,
        "captured_deviation": row.captured,
        "reuse_share": row.reuse,
    }


def _estimate(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else asdict(estimate)
