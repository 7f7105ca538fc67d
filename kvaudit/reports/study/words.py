"""A study's grid, frontier and deviance as sentences and cells, the same in every format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvaudit.analysis.deviance import FEWEST_BLOCKS, SURE
from kvaudit.analysis.frontier import Standing
from kvaudit.analysis.stats import ALPHA, Estimate
from kvaudit.reports.escape import visible
from kvaudit.reports.words.findings import reason_sentence
from kvaudit.reports.words.numbers import counted, names, number, p_value, percent
from kvaudit.study.grid import RATIO, RATIO_FREE, StudyGrid

if TYPE_CHECKING:
    from kvaudit.analysis.deviance import Deviance, Term
    from kvaudit.study.results import Explained, Row, StudyResults

MOST_NAMED = 5
MARKS: Mapping[Standing, str] = MappingProxyType(
    {"frontier": "*", "within-intervals": "~", "beaten": "", "unknown": "?"}
)
FRONTIER_NOTE = (
    "*: no other row has as much fidelity, as little variation and as much speed-up at once, and more of one. "
    "~: beaten, but by none whose 95 % interval lies apart in any of the three. ?: inconclusive, or a measure is "
    "missing. A frontier goes by point estimates: that two rows differ, it does not say."
)
MEASURES_NOTE = (
    "fidelity: mean over orders, interval over requests; speed-up: full prefill's TTFT over the policy's, median over "
    "requests, exact interval of a median. All cells share one full prefill, and so one measurement of its TTFT; cells "
    "ran one after the other, and times compare only where the machine had nothing else to do."
)
DEVIANCE_NOTE = (
    "Binomial model, logit link, on cells, with a copy of a cell for each combination that is known to equal it; "
    "drop-one: by how much the deviance rises when a switch is taken out of all "
    "main effects (an interaction: out of all of them and all two-way interactions); sequential: in the order of the "
    "table. share: drop-one over the deviance between cells. The same requests are in every cell, so that deviances "
    "are tested by no chi-square: intervals and `largest` resample blocks of requests with all their cells, where "
    f"there are {FEWEST_BLOCKS} or more; a resample in which cells do not differ makes no switch the largest, and "
    "leaves shares open from 0 to 100 %. p exchanges a switch's values within blocks, all else equal, Holm over the "
    "switches of one policy and one event, not over policies and events. A switch is said to explain most where p is "
    f"at most {ALPHA:g}, where it takes more than any other in {percent(SURE)} of resamples, and where all "
    "interactions together take no more."
)


def grid_lines(grid: StudyGrid, arms: int, requests: int) -> list[str]:
    """What will be run, and what will not since it is known."""
    shared = ", full prefill in the first cell only" if len(grid.cells) > 1 else ""
    return [
        f"study of {grid.kind}: {counted(len(grid.cells), 'cell')}, {counted(arms, 'arm')} of "
        f"{counted(requests, 'request')}: {arms * requests:,} serves{shared}",
        *same_lines([(same.name, same.policies, same.cell, same.why) for same in grid.same]),
        *skipped_lines((skipped.name, skipped.why) for skipped in grid.skipped),
    ]


def same_lines(same: Iterable[tuple[str, Sequence[str], str, str]]) -> list[str]:
    """What is not run because another cell shows it: name, policies, that cell, why."""
    by_why: dict[str, list[str]] = {}
    for name, policies, cell, why in same:
        what = f"{', '.join(policies)} in {name}" if policies else name
        by_why.setdefault(why, []).append(what if cell == name else f"{what} (see {cell})")
    return [f"not run, since {why}: {', '.join(found)}" for why, found in by_why.items()]


def skipped_lines(skipped: Iterable[tuple[str, str]]) -> list[str]:
    by_why: dict[str, list[str]] = {}
    for name, why in skipped:
        by_why.setdefault(why, []).append(name)
    return [f"skipped, since {why}: {', '.join(found)}" for why, found in by_why.items()]


def headline(results: StudyResults) -> list[str]:
    """A study in a few lines: what `kvaudit replay --study` prints at its end."""
    lines = [
        *(explained_sentence(explained) for explained in results.explained),
        *(budget_sentences(results) if results.kind == "budgets" else ()),
    ]
    frontier = [row for row, standing in zip(results.rows, results.standing, strict=True) if standing == "frontier"]
    if frontier:
        best = names([where(row, results) for row in by_fidelity(frontier)], MOST_NAMED)
        lines.append(f"Frontier of fidelity, answer variation and TTFT: {best}.")
    return [*map(visible, lines), verdict_line(results)]


def verdict_line(results: StudyResults) -> str:
    cells = counted(len(results.cells), "cell")
    if not results.exit_code:
        return f"Study: conclusive ({cells}; exit code 0)"
    what = [_failures(results)] if results.failed else []
    what += [counted(len(results.missing), "cell") + " missing"] if results.missing else []
    what += [f"{counted(len(results.doubtful), 'row')} of {len(results.rows)} inconclusive"] if results.doubtful else []
    outcome = "incomplete" if results.failed else "inconclusive"
    return f"Study: {outcome} ({', '.join(what) or 'nothing was run'} of {cells}; exit code {results.exit_code})"


def _failures(results: StudyResults) -> str:
    policies = dict.fromkeys(failure.policy for failure in results.failed)
    where_failed = len({failure.cell for failure in results.failed})
    return f"{names(list(policies), MOST_NAMED)} failed in {where_failed}"


def doubts(results: StudyResults) -> list[str]:
    """Why the study is no conclusive one, a line for each failure, each missing cell and each inconclusive row."""
    return [
        *(
            f"{failure.cell}: policy {failure.policy} failed: {failure.why}; the same command tries it again"
            for failure in results.failed
        ),
        *(f"{name}: {_missing_because(name, results)}" for name in results.missing),
        *(f"{where(row, results)}: {' '.join(map(reason_sentence, row.reasons))}" for row in results.doubtful),
    ]


def _missing_because(name: str, results: StudyResults) -> str:
    if name in results.unreadable:
        return f"left out, since it cannot be read: {results.unreadable[name]}"
    return "not replayed yet; the same command goes on"


def where(row: Row, results: StudyResults) -> str:
    """A row's policy, and its cell where there are several."""
    return f"{row.policy} at {setting(row, results)}" if len(results.cells) > 1 else row.policy


def setting(row: Row, results: StudyResults) -> str:
    """What sets a row's cell apart, in words; of a policy that has no ratio, any."""
    axes = results.described["axes"]
    free = row.policy in RATIO_FREE
    values = ("any ratio" if free and axis == RATIO else value_text(axis, row.cell.value(axis)) for axis in axes)
    return " + ".join(values) or row.cell.name


def value_text(axis: str, value: Any) -> str:
    return f"{100 * float(value):g} %" if axis == RATIO else str(value)


def by_fidelity(rows: Iterable[Row]) -> list[Row]:
    """The most faithful first; of equals the one with the least variation, then the fastest."""

    def key(row: Row) -> tuple[float, float, float]:
        measured = (row.mean_fidelity, row.variation, row.speedup)
        fidelity, variation, speedup = (None if one is None else one.value for one in measured)
        return -(fidelity or 0.0), 1.0 if variation is None else variation, -(speedup or 0.0)

    return sorted(rows, key=key)


def share(estimate: Estimate | None) -> str:
    """A share with its 95 % interval, in percent."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return percent(estimate.value)
    return f"{percent(estimate.value)} ({100 * estimate.low:.1f}-{100 * estimate.high:.1f})"


def plain(estimate: Estimate | None, digits: int = 2) -> str:
    """A number with its 95 % interval, for a table whose head says what it is."""
    if estimate is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return number(estimate.value, digits)
    return f"{number(estimate.value, digits)} ({number(estimate.low, digits)}-{number(estimate.high, digits)})"


def plain_percent(estimate: Estimate | None) -> str:
    """A share in percent, for a table whose head says so."""
    return share(estimate).replace(" %", "", 1)


def budget_sentences(results: StudyResults) -> list[str]:
    """For each policy with several ratios, from which on no answer differed from full prefill's, a sentence.

    That is claimed of a ratio only where each higher one of the study was run, is conclusive, and shows it too.
    """
    sentences = []
    for policy in dict.fromkeys(row.policy for row in results.rows):
        ratios = sorted(cell.recompute_ratio for cell in results.cells if policy in cell.policies)
        known = {row.cell.recompute_ratio: row for row in results.rows if row.policy == policy and _is_known(row)}
        if known and len(ratios) > 1:
            sentences.append(f"{policy}: {_reaches_full(known, ratios)}.")
    return sentences


def _is_known(row: Row) -> bool:
    return row.mean_fidelity is not None and not row.finding.reasons


def _reaches_full(known: Mapping[float, Row], ratios: Sequence[float]) -> str:
    """`ratios`, ascending, are those that the study has for a policy; `known` are its conclusive rows, by ratio."""
    equal = [ratio for ratio in ratios if ratio in known and not _is_lost(known[ratio])]
    lost = [ratio for ratio in ratios if ratio in known and _is_lost(known[ratio])]
    untold = [ratio for ratio in ratios if ratio not in known]
    full = [ratio for ratio in equal if ratio > max([*lost, *untold], default=-1.0)]
    if full:
        fidelity = known[full[0]].mean_fidelity
        low = None if fidelity is None else fidelity.low
        bound = "" if low is None else f", which leaves fidelities from {percent(low)} on possible"
        return f"from {_ratio_text(full[0])} on every answer equals full prefill's{bound}"
    lowest = min(equal, default=-1.0)
    lost, untold = ([ratio for ratio in ratios if ratio > lowest] for ratios in (lost, untold))
    told = [f"at {_ratio_text(lost[-1])} fidelity is {share(known[lost[-1]].mean_fidelity)}"] if lost else []
    told += [f"nothing can be said of {_ratio_texts(untold)}"] if untold else []
    if not equal:
        which = "no conclusive ratio" if untold else "no ratio"
        return f"at {which} of this study do all answers equal full prefill's; {'; '.join(told)}"
    return (
        f"every answer equals full prefill's at {_ratio_texts(equal)}, which cannot be said of every higher ratio: "
        f"{'; '.join(told)}"
    )


def _is_lost(row: Row) -> bool:
    return row.mean_fidelity is None or row.mean_fidelity.value < 1


def _ratio_text(ratio: float) -> str:
    return value_text(RATIO, ratio)


def _ratio_texts(ratios: Sequence[float]) -> str:
    return ", ".join(map(_ratio_text, ratios))


def explained_sentence(explained: Explained) -> str:
    """Which switch explains most of what differs between cells, or that it cannot be told, with the numbers."""
    found = explained.deviance
    what = _EFFECTS[explained.event]
    if found.cannot is not None:
        why = _CANNOT.get(found.cannot, found.cannot)
        return f"{explained.policy}: no switch can be said to explain {what}: {why.format(event=explained.event)}."
    most = found.switches[0]
    told = (
        f"{percent(most.share)} of the deviance between {found.cells} cells ({_interval(most)}), "
        f"{explained.event} {_levels(most)}"
    )
    if found.explaining is None:
        head = f"{explained.policy}: which switch explains most of {what} cannot be told"
        return f"{head}: most is {_words(most.name)}'s, {told}; {_why(found)}."
    verb = f"explains most of {what}" if most.share >= 0.5 else f"explains more of {what} than any other switch"
    return f"{explained.policy}: {_words(most.name)} {verb}: {told}; {_evidence(most)}."


_EFFECTS: Mapping[str, str] = MappingProxyType(
    {"fidelity": "the loss of fidelity", "answer variation": "the answer variation"}
)
_CANNOT: Mapping[str, str] = MappingProxyType(
    {
        "no answer showed it in any cell": "{event} is 0 % in every cell",
        "every answer showed it in every cell": "{event} is 100 % in every cell",
        "every cell shows the same share": "{event} is the same in every cell",
    }
)


def _words(term: str) -> str:
    return term.replace("_", "-")


def _levels(term: Term) -> str:
    return ", ".join(f"{level.value} {percent(level.share)}" for level in term.levels) or "no matched cells"


def _interval(term: Term) -> str:
    found = _range(term)
    return f"95 % interval {found} %" if found else f"no interval from fewer than {FEWEST_BLOCKS} blocks of requests"


def _range(term: Term) -> str:
    """The interval of a share, in percent; nothing where there is none."""
    if term.share_low is None or term.share_high is None:
        return ""
    return f"{100 * term.share_low:.1f} to {100 * term.share_high:.1f}"


def _evidence(term: Term) -> str:
    largest = "" if term.largest is None else f"the largest in {percent(term.largest, 0)} of resamples, "
    return f"{largest}permutation p {p_value(term.p_adjusted)} after Holm"


def _why(found: Deviance) -> str:
    """Why no switch is named."""
    most = found.switches[0]
    if found.main > most.marginal:
        return f"{_evidence(most)}, and all interactions together take {percent(found.main / found.null)}"
    blocks = f"{counted(found.blocks, 'independent block')} of requests"
    if most.smallest_p is not None and most.smallest_p > ALPHA:
        return f"{_evidence(most)}; on {blocks} it cannot be below {p_value(most.smallest_p)}, whatever the effect"
    if found.blocks < FEWEST_BLOCKS:
        return f"{_evidence(most)}; {blocks} are too few to resample, {FEWEST_BLOCKS} are needed"
    return f"{_evidence(most)}, on {blocks}"


def deviance_rows(found: Deviance) -> list[list[str]]:
    """The table of an analysis of deviance: term, df, sequential, drop-one, share, largest, p."""
    return [
        [
            _words(term.name),
            str(term.df),
            number(term.sequential, 1),
            number(term.marginal, 1),
            f"{percent(term.share)} ({_range(term)})" if _range(term) else percent(term.share),
            "-" if term.largest is None else percent(term.largest, 0),
            p_value(term.p_adjusted),
        ]
        for term in found.terms
    ]


def deviance_lines(explained: Explained) -> list[str]:
    found = explained.deviance
    levels = [f"{_words(term.name)}: {_levels(term)}" for term in found.switches]
    left = (
        f"deviance between {found.cells} cells {number(found.null, 1)}; left after main effects "
        f"{number(found.main, 1)}, after two-way interactions {number(found.two_way, 1)}; "
        f"{counted(found.blocks, 'block')} of requests"
    )
    return [left, *levels]


def axes_line(described: Mapping[str, Any]) -> str:
    """In what cells differ."""
    axes = described["axes"]
    told = (f"{axis.replace('_', ' ')} {', '.join(value_text(axis, value) for value in axes[axis])}" for axis in axes)
    return f"varied: {'; '.join(told) or 'policies'}"


def settings_line(described: Mapping[str, Any]) -> str:
    """What all cells share."""
    settings = dict(described["settings"])
    switches = settings.pop("switches", {})
    shared = {name: value for name, value in {**settings, **switches}.items() if value not in (None, {}, [])}
    return "fixed: " + ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shared.items())
