"""Whether an engine really works: its settings, its start, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from kvaudit.doctor.checks import Finding, Progress, run_checks
from kvaudit.doctor.checks.given import Given
from kvaudit.engines import Capabilities, Engine, EngineSettings, Probed
from kvaudit.engines.server.probing import SHORT, new_prompt
from kvaudit.errors import EngineError, KvauditError
from kvaudit.plugins import load
from kvaudit.policies import Policy
from kvaudit.policies.as_served import AsServed
from kvaudit.prompts import prompt_of
from kvaudit.records import DOCUMENT, QUERY, Prompt, PromptSegment, Reference, Sampling, Served

ANSWERS = "answers"
_PROMPT_TOKENS = 320
"""Two blocks and more of any prefix cache."""
_QUERY_TOKENS = 4
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
    for one answer, by full prefill and with its cache in use, with resets between.
    """
    found: tuple[Setting, ...] = ()
    try:
        found = _settings(name, settings)
        open_engine = load("engines", name)
        findings = _findings(lambda: open_engine(settings), progress)
    except KvauditError as error:
        return Trial(name, settings.model, found, (), error.message, error.hint, error.exit_code)
    except (Exception, SystemExit) as error:
        return Trial(name, settings.model, found, (), f"{type(error).__name__}: {error}", None, EngineError.exit_code)
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
    """One prompt by full prefill, and three times with the cache in use: new, again, and again after a reset. Every
    answer that nothing was reused for must be the same whenever it is asked for."""
    try:
        states = [engine.reset()]
        prompt = _taken(engine)
        policy = Given((0,)) if engine.capabilities.policies else AsServed()

        def served(name: str, policy: Policy | None, reference: Reference | None = None) -> Served:
            return engine.serve(f"doctor-{name}", "request", prompt, Sampling(_ANSWER_TOKENS), policy, reference)

        full = served("full", None)
        reference = full.reference or Reference(full.answer_ids)
        states.append(engine.reset())
        cold, warm = served("cold", policy, reference), served("warm", policy, reference)
        states.append(engine.reset())
        again = served("again", policy, reference)
        states.append(engine.reset())
        full_again = served("full-again", None, reference)
    finally:
        engine.close()
    told_as = ("tokens", full.answer_ids) if full.answer_ids else ("characters", full.answer_text)
    evidence = {f"answer {told_as[0]}": float(len(told_as[1]))}
    for name, one in (("new", cold), ("again", warm), ("after a reset", again)):
        if one.reused_tokens is not None:
            evidence[f"tokens reused, {name}"] = float(one.reused_tokens)
    if left := max(state.entries or 0 for state in states):
        return Finding(ANSWERS, "failed", evidence=evidence, reason=f"{left} entries are left after a reset")
    if reused := full.reused_tokens or full_again.reused_tokens:
        return Finding(ANSWERS, "failed", evidence=evidence, reason=f"a full prefill reused {reused} tokens")
    if cold.reused_tokens is None or warm.reused_tokens is None or again.reused_tokens is None:
        reason = "the engine does not say what it reuses, so that nobody sees whether a reset empties its cache"
        return Finding(ANSWERS, "inconclusive", evidence=evidence, reason=reason)
    if not warm.reused_tokens:
        reason = "nothing was reused of a prompt that came again, so that a reset had nothing to empty"
        return Finding(ANSWERS, "inconclusive", evidence=evidence, reason=reason)
    if again.reused_tokens > cold.reused_tokens or cold.reused_tokens >= warm.reused_tokens:
        reason = f"{again.reused_tokens} tokens of a prompt are reused right after a reset"
        return Finding(ANSWERS, "failed", evidence=evidence, reason=reason)
    if _told(full) != _told(full_again) or _told(cold) != _told(again):
        return Finding(ANSWERS, "failed", evidence=evidence, reason="the same prompt got another answer after a reset")
    if not any(_told(full)):
        return Finding(ANSWERS, "inconclusive", evidence=evidence, reason="every answer is empty")
    value = "it answers, reuses what it cached, and after a reset answers the same with nothing of that reused"
    return Finding(ANSWERS, "seen", value, evidence=evidence)


def _told(served: Served) -> tuple[object, ...]:
    return served.answer_ids, served.answer_text


def _taken(engine: Engine) -> Prompt:
    """A prompt as the engine takes it: token ids, or, for one without a tokenizer of ours, a chat or a text."""
    if engine.tokenizer is not None:
        return _of_ids(engine.capabilities)
    chat = _of_words(chat=True)
    try:
        engine.serve("doctor-chat", "request", chat, Sampling(_ANSWER_TOKENS), None)
    except KvauditError:
        return _of_words(chat=False)
    return chat


def _of_ids(capabilities: Capabilities) -> Prompt:
    size = capabilities.vocabulary_size or 256
    longest = capabilities.max_prompt_tokens or _PROMPT_TOKENS + _ANSWER_TOKENS
    count, first = min(_PROMPT_TOKENS, longest - _ANSWER_TOKENS), size // 4
    ids = [first + place * 7 % max(1, size // 4) for place in range(count)]
    return prompt_of(((DOCUMENT, ids[:-_QUERY_TOKENS]), (QUERY, ids[-_QUERY_TOKENS:])))


def _of_words(*, chat: bool) -> Prompt:
    wording = new_prompt(SHORT, chat=chat)
    said = (wording.messages[0][1] if chat else wording.text).encode()
    return Prompt((), (PromptSegment(DOCUMENT, sha256(said).hexdigest()[:16], 0, len(said)),), wording)
