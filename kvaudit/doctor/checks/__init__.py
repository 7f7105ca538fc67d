"""Checks of what an engine really does, by serving it prompts and looking at what comes of them.

findings.py   what a check saw             noise.py       repeats in one launch and in two
given.py      selection under control      causality.py   do recomputed rows see later tokens?
measuring.py  differences against noise    gap.py         what stands between chunks?
lab.py        seeded prompts, served       saving.py      is a new chunk ever not stored?
                                           lookup.py      does a miss hide later hits?
                                           discipline.py  who wins, the first or the last writer?
                                           position.py    does a chunk that moves keep its keys?

No check reads an engine's code or trusts its settings. Each has a control of its own, and one that cannot see says
inconclusive. The same checks run on the embedded engine's switches, where the right result is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from kvaudit.doctor.checks.causality import causality
from kvaudit.doctor.checks.discipline import discipline
from kvaudit.doctor.checks.findings import Finding, Inconclusive, Outcome
from kvaudit.doctor.checks.gap import gap
from kvaudit.doctor.checks.lab import Lab
from kvaudit.doctor.checks.lookup import lookup
from kvaudit.doctor.checks.noise import NAME as NOISE
from kvaudit.doctor.checks.noise import Noise, Take, take
from kvaudit.doctor.checks.position import position
from kvaudit.doctor.checks.saving import save_loss
from kvaudit.engines import Engine, Probed
from kvaudit.errors import EngineError

__all__ = ["CHECKS", "NOISE", "Finding", "Outcome", "run_checks"]

Check = Callable[[Lab], Finding]
T = TypeVar("T")

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "causality": causality,
        "gap": gap,
        "save loss": save_loss,
        "lookup": lookup,
        "discipline": discipline,
        "position": position,
    }
)
"""By name, in the order in which they run, after noise, which gives them their scale."""

Progress = Callable[[str], None]
"""Told what begins: a launch of the engine, or a check by its name."""


def run_checks(open_engine: Callable[[], Engine], progress: Progress | None = None, seed: int = 0) -> list[Finding]:
    """Run every check, noise first. The engine is launched twice, one after the other, and closed in the end.

    A check that fails is a finding that says so (`failed`), and the others still run. Raises what `open_engine` raises,
    and EngineError for an engine that does not show its cache.
    """
    tell = progress or (lambda what: None)
    tell("first launch")
    with _opened(open_engine) as engine:
        tell(NOISE)
        here = _contained(NOISE, lambda: (_take(engine, seed), _take(engine, seed)))
    tell("second launch")
    with _opened(open_engine) as engine:
        tell(NOISE)
        noise = here if isinstance(here, Finding) else _contained(NOISE, lambda: Noise(here, (_take(engine, seed),)))
        relative, findings = (None, [noise]) if isinstance(noise, Finding) else (noise.relative, [noise.finding()])
        for name, check in CHECKS.items():
            tell(name)
            findings.append(_contained(name, partial(_checked, check, engine, name, relative, seed)))
    return findings


def _checked(check: Check, engine: Probed, name: str, noise: float | None, seed: int) -> Finding:
    return check(Lab(engine, name, noise, seed))


def _take(engine: Probed, seed: int) -> Take:
    return take(Lab(engine, NOISE, None, seed))


@contextmanager
def _opened(open_engine: Callable[[], Engine]) -> Iterator[Probed]:
    engine = open_engine()
    try:
        if not isinstance(engine, Probed):
            raise EngineError(
                "the engine does not show what is in its cache, and its checks need that",
                "`kvaudit replay` audits its answers alone",
            )
        yield engine
    finally:
        engine.close()


def _contained(name: str, run: Callable[[], T]) -> T | Finding:
    """What `run` returns, or the finding that it could not see or failed."""
    try:
        return run()
    except Inconclusive as end:
        return Finding(name, "inconclusive", evidence=end.evidence, reason=end.reason)
    except Exception as error:
        return Finding(name, "failed", reason=_first_line(error))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
