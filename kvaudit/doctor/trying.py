"""Whether an engine really works: its settings, its start, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvaudit.doctor.checks import Finding, Progress, run_checks
from kvaudit.engines import Engine, EngineSettings, Probed
from kvaudit.errors import KvauditError
from kvaudit.plugins import load
from kvaudit.prompts import tokens_digest
from kvaudit.records import DOCUMENT, Prompt, PromptSegment, Sampling

ANSWERS = "answers"
_PROMPT_TOKENS = 32
_ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """A settings check that found something. `spoils`: the engine refuses to start with it."""

    name: str
    wrong: str
    fix: str
    spoils: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of trying one engine. `error` and `hint` say why it could not be tried to the end, with the exit code
    that a replay would have ended in."""

    engine: str
    model: str
    settings: tuple[Setting, ...] = ()
    findings: tuple[Finding, ...] = ()
    error: str | None = None
    hint: str | None = None
    error_code: int = 0

    @property
    def exit_code(self) -> int:
        if self.error_code:
            return self.error_code
        outcomes = {finding.outcome for finding in self.findings}
        return 3 if "failed" in outcomes else 4 if "inconclusive" in outcomes else 0


def try_engine(name: str, settings: EngineSettings, progress: Progress | None = None) -> Trial:
    """Check an engine's settings, start it and look at what it does. Whatever goes wrong stands in the result.

    An engine that shows what is in its cache (`Probed`) gets the checks of `kvaudit.doctor.checks`; any other is asked
    for one answer, twice, with a reset between.
    """
    found: tuple[Setting, ...] = ()
    try:
        found = _settings(name, settings)
        open_engine = load("engines", name)
        findings = _findings(lambda: open_engine(settings), progress)
    except KvauditError as error:
        return Trial(name, settings.model, found, (), error.message, error.hint, error.exit_code)
    return Trial(name, settings.model, found, tuple(findings))


def _settings(name: str, settings: EngineSettings) -> tuple[Setting, ...]:
    if name != "lmcache":
        return ()
    from kvaudit.engines.vllm.opening import settings_findings

    return tuple(Setting(one.name, one.wrong, one.fix, one.spoils) for one in settings_findings(settings))


def _findings(open_engine: Callable[[], Engine], progress: Progress | None) -> list[Finding]:
    tell = progress or (lambda what: None)
    tell("opening the engine")
    opened = [open_engine()]
    if not isinstance(opened[0], Probed):
        tell(ANSWERS)
        return [_answers(opened.pop())]
    return run_checks(lambda: opened.pop() if opened else open_engine(), progress)


def _answers(engine: Engine) -> Finding:
    """One prompt by full prefill, twice, the cache emptied between: the same answer both times."""
    try:
        size = engine.capabilities.vocabulary_size or 256
        prompt = _prompt(tuple(position * 7 % size for position in range(1, _PROMPT_TOKENS + 1)))
        first = engine.serve("doctor-1", "request", prompt, Sampling(_ANSWER_TOKENS), None)
        left = engine.reset()
        again = engine.serve("doctor-2", "request", prompt, Sampling(_ANSWER_TOKENS), None)
    finally:
        engine.close()
    evidence = {"answer tokens": float(len(first.answer_ids))}
    if left.entries:
        return Finding(ANSWERS, "failed", evidence=evidence, reason=f"{left.entries} entries are left after a reset")
    if first.answer_ids != again.answer_ids:
        return Finding(ANSWERS, "failed", evidence=evidence, reason="the same prompt got another answer after a reset")
    return Finding(ANSWERS, "seen", "it answers, and the same again after a reset", evidence=evidence)


def _prompt(token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(token_ids, (PromptSegment(DOCUMENT, tokens_digest(token_ids), 0, len(token_ids)),))
