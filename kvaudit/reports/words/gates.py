"""What a gate asks, what was observed, and what would be needed, as sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvaudit.analysis.gates import Gate, GateResult
from kvaudit.reports.escape import visible
from kvaudit.reports.words.numbers import counted, in_blocks, percent, points


def gate_sentence(result: GateResult) -> str:
    head = f"{result.outcome}: {gate_line(result)}"
    if result.value is None:
        return f"{head}: {'nothing was measured' if result.gate in _ABSOLUTE else 'nothing could be paired'}."
    where = f" in the worst order ({visible(result.order)})" if result.order else ""
    value = f"{head}; observed {_gate_value(result, result.value)}{where}"
    if result.why == "broken" and result.gate in _ABSOLUTE:
        return f"{value}, on {counted(result.n, 'request')}."
    if result.why == "finding-inconclusive":
        return f"{value}, but the finding is inconclusive."
    if result.why == "reference-doubtful":
        return f"{value}, but what full prefill answers is in doubt."
    if result.why == "orders-unpaired":
        return f"{value}, but the baseline did not replay every order of this run alike."
    if result.why == "noise-possible":
        return f"{value}, but so few requests changed that run-to-run variation is not ruled out."
    if result.why == "rounding-possible":
        return f"{value}, but how signals are rounded may explain it, or may break the limit."
    if result.why == "broken":
        return f"{value} on {counted(result.n, 'request')}, and the whole 95 % interval is beyond the limit."
    side = "upper" if result.gate in _UPWARD else "lower"
    bound = f"{value}, 95 % {side} bound {_gate_value(result, result.bound)}{in_blocks(result.overlap)}"
    if result.why == "kept":
        return f"{bound}."
    if result.needed is None:
        return f"{bound}: no number of requests can show that the limit is kept at this value."
    return f"{bound}: {counted(result.n, 'request')} are too few; about {result.needed:,} would be needed."


def gate_line(result: GateResult) -> str:
    """What a gate asks of which policy."""
    return f"{visible(result.policy)}, {_GATES[result.gate](result)}"


_ABSOLUTE = frozenset({"min-fidelity", "max-variation"})
_UPWARD = frozenset({"max-variation", "max-variation-rise"})
_GATES: Mapping[Gate, Callable[[GateResult], str]] = MappingProxyType(
    {
        "min-fidelity": lambda r: f"fidelity at least {_limit(r.limit)} %",
        "max-variation": lambda r: f"answer variation at most {_limit(r.limit)} %",
        "non-inferior": lambda r: f"fidelity at most {_limit(r.limit)} points below {visible(r.than or '')}'s",
        "max-fidelity-drop": lambda r: f"fidelity at most {_limit(r.limit)} points below the baseline's",
        "max-variation-rise": lambda r: f"answer variation at most {_limit(r.limit)} points above the baseline's",
    }
)


def _limit(share: float) -> str:
    """A limit as the user set it, in percent."""
    return f"{100 * share:.10g}"


def _gate_value(result: GateResult, value: float | None) -> str:
    return percent(value) if result.gate in _ABSOLUTE else f"{points(value)} points"
