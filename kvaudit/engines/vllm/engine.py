"""Engine `vllm`: vLLM's offline engine, full prefill alone or with the exact prefix cache as the reuse under audit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvaudit.engines import PRESETS, Capabilities, EngineSettings, Tokenizer
from kvaudit.engines.vllm.answering import against, answer, reference_of
from kvaudit.engines.vllm.launch import Running
from kvaudit.engines.vllm.starting import Place, starting_arguments
from kvaudit.errors import EngineError
from kvaudit.policies import Policy
from kvaudit.records import CacheState, Part, Prompt, Reference, Sampling, Served


class VllmEngine:
    """Implements `kvaudit.engines.Engine`. It takes no policy: what stands in a policy's place says that vLLM's prefix
    cache is used, None that it is neither read nor written.

    With prefix caching on, full prefill carries a cache salt of its own. vLLM hashes it into the first block: nothing
    that was cached without it is found, and nobody finds what is cached with it.
    """

    def __init__(self, running: Running, place: Place, settings: EngineSettings, *, prefix_caching: bool) -> None:
        self._running, self._place, self._settings = running, place, settings
        self._prefix_caching = prefix_caching
        self._salts = 0
        self._probe = self._cached_probe() if prefix_caching else None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            policies=False,
            max_prompt_tokens=self._place.max_model_len,
            vocabulary_size=self._place.vocabulary,
            signals=frozenset(),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._place.tokenizer

    def describe(self) -> Mapping[str, object]:
        return {
            **self._place.describe(),
            "prefix_caching": self._prefix_caching,
            "switches": asdict(PRESETS["vllm"]),
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
        salt = None
        if policy is None and self._prefix_caching:
            self._salts += 1
            salt = f"kvaudit-full-prefill-{self._salts}"
        place = self._place
        answered = answer(self._running, prompt, sampling, place.tokenizer, place.end_ids, salt)
        asked = answered.asked
        if policy is None and asked.cached_tokens:
            raise EngineError(f"vLLM took {asked.cached_tokens} tokens of a full prefill from a cache")
        facts: dict[str, Any] = {
            "prompt_tokens": len(prompt.token_ids),
            "ttft_ms": asked.ttft_ms,
            "total_ms": asked.total_ms,
        }
        if answered.answer is None:
            return Served((), "", "length", reused_tokens=asked.cached_tokens, **facts)
        held = {} if reference is None else against(asked.tokens, reference)
        if reference is None and policy is None:
            held["reference"] = reference_of(asked.tokens)
        made = answered.answer
        return Served(made.token_ids, made.text, made.finish_reason, reused_tokens=asked.cached_tokens, **facts, **held)

    def reset(self) -> CacheState:
        """vLLM's own reset, looked after: a prompt whose first block was cached must find nothing of it."""
        if not self._prefix_caching:
            return CacheState(0, 0)
        if self._probe is None:
            self._reset()
            return CacheState(None, None)
        self._cached(self._probe)
        self._reset()
        found = self._cached(self._probe)
        self._reset()
        return CacheState(found // self._running.block_size, None)

    def close(self) -> None:
        self._running.close()

    def _cached_probe(self) -> tuple[int, ...] | None:
        """A prompt of a block and a token that vLLM is seen to find again; None where it does not."""
        block = self._running.block_size
        probe = tuple(token_id % self._place.vocabulary for token_id in range(1, block + 2))
        if len(probe) >= self._place.max_model_len:
            return None
        self._cached(probe)
        return probe if self._cached(probe) else None

    def _cached(self, token_ids: tuple[int, ...]) -> int:
        return self._running.ask(token_ids, 1, lambda token_id: True).cached_tokens

    def _reset(self) -> None:
        if not self._running.reset_prefix_cache():
            raise EngineError("vLLM did not empty its prefix cache", "no other request may be under way")


def open_engine(settings: EngineSettings) -> VllmEngine:
    """Start vLLM. Raises UsageError for settings that cannot work, PluginError for versions that are not supported,
    EngineError when it does not start."""
    from kvaudit.engines.vllm.options import check_own_switches, read_options

    options = read_options("vllm", settings)
    check_own_switches("vllm", settings.switches, PRESETS["vllm"])
    prefix_caching = options.prefix_caching is not False
    place = Place.of("vllm", settings, options)
    launch = starting_arguments(place, settings, options, prefix_caching=prefix_caching)
    running = Running(launch)
    try:
        return VllmEngine(running, place, settings, prefix_caching=prefix_caching)
    except BaseException:
        running.close()
        raise
