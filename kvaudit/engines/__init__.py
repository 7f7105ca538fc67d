"""The contract of an engine: opens with settings, says what it can do, serves one prompt at a time, empties its
cache, closes. One engine a file (or folder) beside this one, one line each in `plugins.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from kvaudit.errors import UsageError
from kvaudit.records import CacheState, Part, Prompt, Reference, Sampling, Served

if TYPE_CHECKING:
    from kvaudit.policies import Floats, Need, Policy, Positions

Mask = Literal["exact", "bottom-right"]
Gap = Literal["recompute", "zero", "store"]
Lookup = Literal["any", "stop-at-miss", "vllm-prefix", "sglang-prefix"]
WriteBack = Literal["first-writer", "last-writer", "isolated", "versioned", "versions", "none"]
Suffix = Literal["after", "with-rows"]
Deviation = Literal["key", "value"]
Keys = Literal["moved", "unmoved"]

DEFAULT_MODEL = "smollm2-135m"

PREFIX_LOOKUPS: frozenset[Lookup] = frozenset({"vllm-prefix", "sglang-prefix"})
"""Lookups that reuse nothing but the KV of exactly the same prefix: no token is left to a policy (N = 0)."""


@dataclass(frozen=True, slots=True)
class Switches:
    """The known differences between engines that reuse KV at non-prefix positions (DESIGN 5).

    `suffix`: `after` blends only up to the end of the last usable hit and computes what follows over the mixed
    cache with an exact mask (LMCache in vLLM); `with-rows` puts the suffix among the recomputed rows.
    `deviation`: whether keys or values rank tokens.
    `keys`: `moved` turns cached keys to where a chunk stands now; `unmoved` loads them as they were turned where it
    was written, which is wrong on purpose (a negative control).
    `write_back`: `versions` keeps a chunk once for each context in which it was computed, up to a limit, and loads the
    version whose context overlaps most with the present one (Cache-Craft); `versioned` loads an entry in the very
    context that wrote it and in no other.
    `lookup`: `vllm-prefix` (chained blocks) and `sglang-prefix` (radix tree) are exact prefix caches, the
    history-free controls. There `write_back` is `first-writer` or `none`, and suffix, deviation and check layer say
    nothing.
    """

    mask: Mask = "bottom-right"
    gap: Gap = "zero"
    lookup: Lookup = "stop-at-miss"
    write_back: WriteBack = "first-writer"
    suffix: Suffix = "after"
    deviation: Deviation = "key"
    check_layer: int = 1
    capacity_bytes: int | None = None
    keys: Keys = "moved"


PRESETS: Mapping[str, Switches] = {
    "lmcache": Switches(),
    "cacheblend": Switches("bottom-right", "recompute", "any", "isolated", "with-rows", "value"),
    "epic": Switches("exact", "recompute", "any", "isolated", "with-rows"),
    "ideal": Switches("exact", "recompute", "any", "first-writer", "with-rows"),
    "block-attention": Switches("exact", "recompute", "any", "isolated", "with-rows"),
    "cache-craft": Switches("exact", "recompute", "any", "versions", "with-rows"),
    "unmoved": Switches("exact", "recompute", "any", "first-writer", "with-rows", keys="unmoved"),
    "vllm": Switches("exact", "recompute", "vllm-prefix", "first-writer", "with-rows"),
    "sglang": Switches("exact", "recompute", "sglang-prefix", "first-writer", "with-rows"),
}

PRESET_NOTES: Mapping[str, str] = {
    "lmcache": "LMCache's in-process CacheBlend in vLLM, what people deploy (the default)",
    "cacheblend": "CacheBlend's own repository",
    "epic": "EPIC's fork of vLLM; with --policy legolink the published method",
    "ideal": "what an engine could do: nothing wrong but the context in which chunks were computed",
    "block-attention": "Block-Attention, TurboRAG, KVLink, MiniPIC with --policy none: their caches and masks, without "
    "their fine-tuned weights (EPIC's switches)",
    "cache-craft": "Cache-Craft (a port): several versions of a chunk, the one with the best context overlap is used",
    "unmoved": "naive reuse whose keys stay turned for where they were written: a negative control",
    "vllm": "vLLM's prefix cache: chained blocks of 16 tokens; exact, history-free",
    "sglang": "SGLang's radix tree: the longest common prefix; exact, history-free",
}
"""Whose switches a preset sets, for people."""


_WITH_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "mask": ("exact",),
    "gap": ("recompute",),
    "write_back": ("first-writer", "none"),
    "keys": ("moved",),
}
"""What these switches may be where nothing is reused but prefixes: an exact computation, whatever else is asked for."""


def check_switches(switches: Switches) -> None:
    """Raise UsageError, naming the switches, for a combination that says nothing."""
    if switches.lookup not in PREFIX_LOOKUPS:
        return
    wrong = [name for name, allowed in _WITH_PREFIXES.items() if getattr(switches, name) not in allowed]
    if wrong:
        told = ", ".join(f"{name.replace('_', '-')} {getattr(switches, name)!r}" for name in wrong)
        options = " ".join(f"--{name.replace('_', '-')} {_WITH_PREFIXES[name][0]}" for name in wrong)
        raise UsageError(
            f"lookup {switches.lookup!r} reuses exact prefixes and computes exactly: {told} says nothing there",
            f"take --like {switches.lookup.partition('-')[0]}, or {options}",
        )


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Everything an engine is opened with; all of it stands in the manifest. `seed` seeds policies per request."""

    model: str = DEFAULT_MODEL
    device: str = "auto"
    dtype: str = "float32"
    recompute_ratio: float = 0.15
    switches: Switches = field(default_factory=Switches)
    seed: int = 0
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. `max_prompt_tokens` counts prompt and answer; token ids lie in [0, vocabulary_size).

    Both are None where the engine cannot say. `signals` are those that it can give to policies, None for all.
    `concurrency`: how many requests it is asked at a time where their history is kept; above 1 `serve` is called from
    several threads. Full prefill and requests that a reset comes before are always served one at a time.
    `selects_once`: a policy can choose tokens once, at the check layer, and nowhere else.
    """

    policies: bool
    max_prompt_tokens: int | None
    vocabulary_size: int | None = None
    signals: frozenset[Need] | None = None
    concurrency: int = 1
    selects_once: bool = False


def unmet(policy: Policy, capabilities: Capabilities) -> str:
    """What a policy needs and an engine cannot give it, in words; empty where it can serve the policy."""
    lacking: list[str] = [] if capabilities.signals is None else sorted(policy.needs - capabilities.signals)
    if capabilities.selects_once and policy.start != "check-layer":
        lacking.append(f"a selection at the {policy.start.replace('-', ' ')}")
    if capabilities.selects_once and policy.narrows:
        lacking.append("a selection that narrows layer by layer")
    return " and ".join(lacking)


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
    def tokenizer(self) -> Tokenizer | None:
        """None for an engine that is given prompts as messages and texts (`Prompt.wording`)."""
        ...

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

        With max_tokens 0 (a prelude) nothing is decoded, and no selection need be told. With `reference`, the answer
        is held against it; without a policy and without a reference, `Served.reference` is filled.
        """
        ...

    def reset(self) -> CacheState:
        """Empty the cache and report what is in it afterwards, as observed."""
        ...

    def close(self) -> None: ...


_LOG_FOLDER: ContextVar[Path | None] = ContextVar("_LOG_FOLDER", default=None)


@contextmanager
def logs_in(folder: Path) -> Iterator[None]:
    """Within it, engines that are opened and write logs put them into this folder, which they make."""
    token = _LOG_FOLDER.set(folder)
    try:
        yield
    finally:
        _LOG_FOLDER.reset(token)


def log_folder() -> Path | None:
    """Where an engine that is opened now puts its logs; None where nobody said."""
    return _LOG_FOLDER.get()


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """What an engine takes for a chunk. `separator_ids`: the token ids at which it splits a prompt, None where the
    prompt's segments tell. `chunk_tokens`: shorter chunks may be lost, 1 where none is.
    """

    separator_ids: tuple[int, ...] | None = None
    chunk_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys (turned to where the tokens stand) and values of P prompt positions, float32 [L, P, G, D], for L layers and
    G KV heads of dimension D, as later tokens attend to them once the prompt is blended.

    Rows that the engine cannot show, since nothing was blended there, are NaN. Below the layer from which selected
    tokens are recomputed they may be what was loaded or what was computed. `served` is the request itself.
    """

    served: Served
    keys: Floats
    values: Floats


@runtime_checkable
class Probed(Engine, Protocol):
    """An engine that shows what is in the cache of the prompt at hand, for the checks of `kvaudit doctor`."""

    @property
    def chunk_rules(self) -> ChunkRules: ...

    def rows(self, request_id: str, prompt: Prompt, policy: Policy, positions: Positions) -> Rows:
        """Serve a request of one answer token, as `serve` would, and show these positions (int64 [P])."""
        ...


def description(engine: Engine) -> dict[str, object]:
    """What an engine says of itself, with the digest of its tokenizer where it has one."""
    tokenizer = engine.tokenizer
    return {**engine.describe(), **({} if tokenizer is None else {"tokenizer_digest": tokenizer.digest})}
