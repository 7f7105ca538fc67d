"""The engine: a server as it is. Reports answers, times and what the server counts, and nothing of its insides."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvaudit.engines import Capabilities
from kvaudit.engines.server.probing import Probe
from kvaudit.engines.server.resetting import Resetter
from kvaudit.engines.server.target import Answered, Target
from kvaudit.errors import EngineError, UsageError
from kvaudit.models.fetch import announce
from kvaudit.policies import Policy
from kvaudit.records import CacheState, Part, Prompt, Reference, Sampling, Served, Wording

_UNTOLD = "does not tell what it reuses (/metrics would: vLLM has it, SGLang with --enable-metrics)"


@dataclass(frozen=True, slots=True)
class FullPrefill:
    """Where answers without reuse come from: another server, a salt of their own, or an emptied cache.

    `differing`: what another server says of itself, and the server under audit says otherwise.
    """

    by: Literal["url", "salt", "reset"]
    target: Target
    differing: tuple[str, ...] = ()

    def facts(self) -> Mapping[str, object]:
        """What another server says of itself; nothing where there is none."""
        if self.by != "url":
            return {}
        claims = self.target.claims
        told = {
            "answers_as": claims.model,
            "system_fingerprint": claims.fingerprint,
            **self.target.facts(),
            "differs": list(self.differing) or None,
        }
        return {f"reference_{name}": value for name, value in told.items()}

    def described(self) -> str:
        url = self.target.connection.base_url
        if self.by == "url":
            counts = self.target.counter.way is not None
            told = "told no cached tokens of a repeated prompt" if counts else _UNTOLD
            return ", ".join([url, f"which {told}", *self.differing])
        if self.by == "salt":
            return "a cache_salt of its own for each request"
        return "the cache emptied before each request"


class ServerEngine:
    def __init__(
        self, target: Target, probe: Probe, resetter: Resetter, full_prefill: FullPrefill, concurrency: int
    ) -> None:
        self._target, self._probe, self._resetter, self._full_prefill = target, probe, resetter, full_prefill
        self._concurrency = concurrency
        self._told_of_leftovers = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(policies=False, max_prompt_tokens=None, signals=frozenset(), concurrency=self._concurrency)

    @property
    def tokenizer(self) -> None:
        return None

    def describe(self) -> Mapping[str, object]:
        target = self._target
        return {
            "server": target.connection.base_url,
            "model": target.manner.model,
            "answers_as": target.claims.model,
            "system_fingerprint": target.claims.fingerprint,
            **target.facts(),
            "reference": self._full_prefill.described(),
            **self._full_prefill.facts(),
            "reset": self._resetter.described(),
            "reset_verified_by": self._probe.by,
            "cached_tokens_from": target.counter.way or "nothing: the server does not count them",
            "restarts_seen_by": "/metrics" if target.counter.watch.sees_restarts else "lost connections alone",
            "fields_left_out": list(target.manner.left_out) or None,
            "concurrency": self._concurrency,
            "restarted": None if self._resetter.is_cheap else True,
            "processor": None,
        }

    def serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None = None,
    ) -> Served:
        """Without a policy: full prefill. Raises EngineError where there is no answer that counts.

        Another server's full prefill comes without its time to first token, which is another machine's.
        """
        wording = prompt.wording
        if wording is None:
            raise EngineError("engine 'server' was given token ids without their wording")
        self._check_api(wording)
        if policy is not None:
            answered = self._target.ask(wording, sampling)
            return _served(answered, prompt, self._reused(answered))
        return self._without_reuse(wording, sampling, prompt)

    def reset(self) -> CacheState:
        """Empty the cache, and look whether a prompt that was in it still is.

        Where that is cheap the cache is emptied once more afterwards: the probe is not part of the history.
        """
        self._target.counter.watch.begin()
        self._check_identity()
        self._probe.warm()
        self._resetter.run()
        self._target.counter.watch.begin()
        cached = self._probe.is_cached()
        if cached and not self._told_of_leftovers:
            announce("a prompt was still cached after the cache was emptied: the audit will be inconclusive")
            self._told_of_leftovers = True
        if self._resetter.is_cheap and cached is not True:
            self._resetter.run()
        self._check_identity()
        return CacheState(None if cached is None else int(cached), None)

    def close(self) -> None:
        other = self._full_prefill.target
        for target in (self._target, *([other] if other is not self._target else [])):
            target.counter.watch.end()
            target.connection.close()

    def _without_reuse(self, wording: Wording, sampling: Sampling, prompt: Prompt) -> Served:
        full, salt, still_cached = self._full_prefill, None, 0
        if full.by == "salt":
            salt = secrets.token_hex(16)
        elif full.by == "reset":
            still_cached = self.reset().entries or 0
        answered = full.target.ask(wording, sampling, salt)
        reused = self._reused(answered) if full.by == "reset" else answered.cached
        served = _served(answered, prompt, None if reused is None else reused + still_cached)
        return replace(served, ttft_ms=None) if full.by == "url" else served

    def _reused(self, answered: Answered) -> int | None:
        """What was cached of the audit's history: not what begins every prompt, which the probe or a server that warms
        up left there, and which is the same whatever came before."""
        cached = answered.cached
        return 0 if cached is not None and cached <= (self._probe.frame or 0) else cached

    def _check_api(self, wording: Wording) -> None:
        if wording.messages and self._target.manner.api == "completions":
            raise UsageError(
                "--api completions, and the trace has chats, which the server's template must render",
                "leave --api out",
            )
        if wording.token_ids and self._target.manner.api == "chat":
            raise UsageError("--api chat, and the trace has token ids, which no chat takes", "leave --api out")

    def _check_identity(self) -> None:
        """Raises EngineError where another model or version is behind a URL than at the opening."""
        self._target.check_identity()
        if self._full_prefill.target is not self._target:
            self._full_prefill.target.check_identity()


def _served(answered: Answered, prompt: Prompt, reused: int | None) -> Served:
    reply = answered.reply
    told = reply.answer.counts()["prompt_tokens"]
    return Served(
        answer_ids=tuple(reply.token_ids),
        answer_text=answered.text,
        finish_reason=answered.choice.finish_reason or "unknown",
        prompt_tokens=prompt.length if told is None else told,
        ttft_ms=reply.ttft_ms,
        total_ms=reply.total_ms,
        reused_tokens=reused,
        reusable_tokens=None,
        recomputed_tokens=None,
        budget_k=None,
        attempts=answered.attempts,
    )
