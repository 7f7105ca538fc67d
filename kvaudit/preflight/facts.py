"""An inspection as data: what the page says in words and `--format json` as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvaudit.preflight.findings import RULES, Finding
from kvaudit.preflight.inspection import Inspection
from kvaudit.preflight.reuse import RATIOS, BreakTotal

REPORT_VERSION = 1
MOST_BREAKS = 6


@dataclass(frozen=True, slots=True)
class About:
    """What was inspected, and with what. `tokenizer` is None where only carried token ids were read.

    `left_out` says what a log of others holds that is no request, as rows of reason, count and first places. `hashes`
    names the format of a trace without prompts. `cut_command` cuts its prompts where texts recur.
    """

    trace: str
    tokenizer: str | None
    tokenizer_digest: str | None
    context_tokens: int | None
    notes: tuple[str, ...] = ()
    left_out: tuple[Mapping[str, object], ...] = ()
    hashes: str | None = None
    cut_command: str = "kvaudit record import --segment auto"


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def breaks(inspection: Inspection) -> list[tuple[str, str, BreakTotal]]:
    """(kind of the segment, how, total), those that cost the most tokens first."""
    found = [(kind, how, total) for (kind, how), total in inspection.totals.breaks.items()]
    return sorted(found, key=lambda one: (-one[2].tokens, -one[2].requests, one[0], one[1]))


def as_data(inspection: Inspection, about: About, most: int) -> dict[str, object]:
    """Stable keys. `findings` holds the `most` costliest, `finding_totals` all of them by code."""
    totals = inspection.totals
    return {
        "inspect_version": REPORT_VERSION,
        "trace": about.trace,
        "tokenizer": about.tokenizer,
        "tokenizer_digest": about.tokenizer_digest,
        "context_tokens": about.context_tokens,
        "notes": list(about.notes),
        "left_out_of_log": list(about.left_out),
        "hashed": inspection.hashed and {"format": about.hashes, **asdict(inspection.hashed)},
        "counts": {
            "requests": inspection.requests,
            "chats": inspection.chats,
            "sessions": len(inspection.sessions),
            "analysed": totals.requests,
            "left_out": inspection.left_out,
            "refused": inspection.refused,
            "prompt_tokens": totals.prompt_tokens,
            "prelude_tokens": totals.prelude_tokens,
            "longest_prompt": {"tokens": totals.longest_prompt, "request_id": totals.longest_request},
            "distinct_chunks": inspection.distinct_chunks,
            "segments": dict(sorted(inspection.kinds.items())),
            "segment_tokens": dict(sorted(inspection.kind_tokens.items())),
        },
        "reuse": _reuse(inspection),
        "breaks": [_break(*one, after_break(inspection)) for one in breaks(inspection)],
        "recompute": [] if inspection.hashed else [_recompute(inspection, ratio) for ratio in RATIOS],
        "findings": [_finding(finding, about) for finding in inspection.findings[:most]],
        "finding_totals": _finding_totals(inspection.findings),
        "unchecked_pairs": inspection.unchecked_pairs,
    }


def _reuse(inspection: Inspection) -> dict[str, object]:
    totals, caches = inspection.totals, inspection.caches
    exact, chunks = ("vllm_reused", "sglang_reused"), ("chunk_reused_any", "chunk_reused_stop_at_miss")
    return {
        "capacity_tokens": caches.capacity,
        "vllm_block_tokens": caches.block_tokens,
        "sglang_page_tokens": caches.page_tokens,
        "too_large_for_the_cache": totals.too_large,
        **{name: getattr(totals, name) for name in exact},
        **{name: None if inspection.hashed else getattr(totals, name) for name in chunks},
    }


def after_break(inspection: Inspection) -> str:
    """Which tokens after the end of a cached prefix are counted."""
    return "computed" if inspection.hashed else "cached"


def _break(kind: str, how: str, total: BreakTotal, after: str) -> dict[str, object]:
    row = total.worst
    broken = row.broken if row else None
    return {
        "kind": kind,
        "how": how,
        "requests": total.requests,
        f"{after}_tokens_after": total.tokens,
        "worst": row
        and broken
        and {
            "request_id": row.request_id,
            "segment": broken.segment,
            "token": broken.token,
            "prefix_from": broken.prefix_from,
            f"{after}_tokens_after": total.worst_tokens,
        },
    }


def _recompute(inspection: Inspection, ratio: float) -> dict[str, object]:
    prefilled = inspection.totals.prefilled
    return {
        "ratio": ratio,
        "prefilled_any": prefilled[ratio, "any"],
        "prefilled_stop_at_miss": prefilled[ratio, "stop-at-miss"],
    }


def _finding(finding: Finding, about: About) -> dict[str, object]:
    place, rule = finding.place, finding.rule
    return {
        "code": finding.code,
        "severity": rule.severity,
        "request_id": place.request_id or None,
        "segment": place.segment,
        "kind": place.kind,
        "occurrences": finding.occurrences,
        "tokens": finding.tokens,
        "what": finding.what,
        "remedy": rule.remedy,
        "command": about.cut_command if rule.cuts else None,
    }


def _finding_totals(findings: list[Finding]) -> list[dict[str, object]]:
    tokens: Counter[str] = Counter()
    occurrences: Counter[str] = Counter()
    for finding in findings:
        tokens[finding.code] += finding.tokens
        occurrences[finding.code] += finding.occurrences
    return [
        {
            "code": code,
            "severity": RULES[code].severity,
            "occurrences": occurrences[code],
            "tokens": tokens[code],
            "tokens_are": RULES[code].counts,
        }
        for code in sorted(tokens, key=lambda code: (-tokens[code], code))
    ]
