"""The contract of an engine: opens with settings, says what it can do, serves one prompt at a time, empties its
cache, closes. One engine a file (or folder) beside this one, one line each in `plugins.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from kvaudit.records import CacheState, Part, Prompt, Reference, Sampling, Served

if TYPE_CHECKING:
    from kvaudit.policies import Policy

Mask = Literal["exact", "bottom-right"]
Gap = Literal["recompute", "zero", "store"]
Lookup = Literal["any", "stop-at-miss"]
WriteBack = Literal["first-writer", "last-writer", "isolated", "versioned", "none"]
Suffix = Literal["after", "with-rows"]
Deviation = Literal["key", "value"]


@dataclass(frozen=True, slots=True)
class Switches:
    """The known differences between engines that reuse KV at non-prefix positions (DESIGN 5).

    `suffix`: `after` blends only up to the end of the last usable hit and computes what follows over the mixed
    cache with an exact mask (LMCache in vLLM); `with-rows` puts the suffix among the recomputed rows.
    `deviation`: whether keys or values rank tokens.
    """

    mask: Mask = "bottom-right"
    gap: Gap = "zero"
    lookup: Lookup = "stop-at-miss"
    write_back: WriteBack = "first-writer"
    suffix: Suffix = "after"
    deviation: Deviation = "key"
    check_layer: int = 1
    capacity_bytes: int | None = None


PRESETS: Mapping[str, Switches] = {
    "lmcache": Switches(),
    "cacheblend": Switches("bottom-right", "recompute", "any", "isolated", "with-rows", "value"),
    "epic": Switches("exact", "recompute", "any", "isolated", "with-rows"),
    "ideal": Switches("exact", "recompute", "any", "first-writer", "with-rows"),
}


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything an engine is opened with; all of it stands in the manifest. `seed` seeds policies per request."""

    model: str = "smollm2-135m"
    device: str = "auto"
    dtype: str = "float32"
    recompute_ratio: float = 0.15
    switches: Switches = field(default_factory=Switches)
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. `max_prompt_tokens` counts prompt and answer; token ids lie in [0, vocabulary_size).

    Both are None where the engine cannot say.
    """

    policies: bool
    max_prompt_tokens: int | None
    vocabulary_size: int | None = None


class Tokenizer(Protocol):
    """Text to token ids and back. `chat` renders messages with the model's template as (kind, text) pieces."""

    @property
    def digest(self) -> str: ...

    @property
    def leading_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer itself puts before every text that is not rendered by a chat template (BOS)."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        """(index of the message or None for template glue, text), in order, for (role, content) messages."""
        ...


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def describe(self) -> Mapping[str, object]:
        """Model, weight digest, device, versions and switches in force, as JSON-ready data for the manifest."""
        ...

    def serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None = None,
    ) -> Served:
        """Serve one prompt and write back. Without a policy: full prefill, the cache neither read nor written.

        With max_tokens 0 (a prelude) nothing is decoded. With `reference`, the answer is held against it; without a
        policy and without a reference, `Served.reference` is filled.
        """
        ...

    def reset(self) -> CacheState:
        """Empty the cache and report what is in it afterwards, as observed."""
        ...

    def close(self) -> None: ...
