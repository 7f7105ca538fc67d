"""What an engine tells its worker about one prompt, and what the worker observed of it: plain data, pickled by value.

Positions are prompt positions; ranges are half-open. N is the blended range: LMCache blends all tokens from position 0
to the end of the last chunk that it loads, gaps among them, and every one of them may be selected.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvaudit.policies import Floats, Policy, Positions
from kvaudit.records import Eviction, Part, Prompt, Provenance, Write

Mode = Literal["prefill", "own", "policy"]
"""`prefill`: the cache is neither read nor written. `own`: LMCache selects as it ships. `policy`: kvaudit's policy
selects in its place."""

T = TypeVar("T")

POLICY_FILES = "_kvaudit_policy_"
"""How modules begin that `policy_specs.files` made of a user's file: nobody else can import them."""


@dataclass(frozen=True, slots=True)
class Job:
    """The next prompt. It is set before the prompt is given to vLLM, and there is one at a time.

    ratio: the recompute ratio, from which a policy makes its budget. LMCache's own selection takes the one that
        LMCache was opened with.
    seed: of the run, for the policy's random generator.
    policy: what selects in mode `policy`; in mode `own` a watched one may look on, for what it notices: its own
        choice is not taken.
    rows: positions of the prompt whose mixed keys and values are wanted; None for none.
    """

    request_id: str
    part: Part
    prompt: Prompt
    mode: Mode
    ratio: float
    seed: int = 0
    policy: Policy | None = None
    rows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.policy is None if self.mode == "policy" else self.policy is not None and self.mode == "prefill":
            raise ValueError(f"mode {self.mode!r} with policy {self.policy!r}")

    def packed(self) -> bytes:
        """The pickle, a policy by value where it comes out of a user's file. Needs cloudpickle, which vLLM brings."""
        import cloudpickle

        with _by_value():
            return bytes(cloudpickle.dumps(self))

    @classmethod
    def unpacked(cls, packed: bytes) -> Job:
        return _of(cls, packed)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of the prompt that LMCache treats as one cache entry, separators left out.

    key: LMCache's hash of the chunk's own token ids, hexadecimal. loaded: whether its KV came out of the cache.
    stored: whether the cache held it, in all layers, after the prompt was served.
    """

    start: int
    end: int
    key: str
    loaded: bool
    stored: bool


@dataclass(frozen=True, slots=True)
class Blended:
    """What LMCBlender did: N tokens, of which k were to be recomputed from the check layer on.

    layer: the check layer. selected: int64, ascending, those that were. deviation: float32 [N], LMCache's own squared
    L2 distance of fresh from loaded keys at that layer, over all KV heads; a gap's loaded keys are zero.
    """

    tokens: int
    layer: int
    k: int
    selected: Positions
    deviation: Floats


@dataclass(frozen=True, slots=True)
class Rows:
    """Mixed keys and values as vLLM attends to them when the prompt has been served: float32 [layers, P, KV heads x
    head dim] each, of P asked positions in the order in which they were asked for; keys are rotated.

    Below the check layer they are what was loaded (zero at gaps) even of selected tokens: LMCache computes these layers
    for all tokens and writes none of it back.
    """

    positions: tuple[int, ...]
    keys: Floats
    values: Floats


@dataclass(frozen=True, slots=True)
class Failure:
    """A policy's error, as message and hint. LMCache's own selection took its place, so that the engine lives on: what
    was served is no answer of the policy's."""

    message: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Record:
    """What was observed of the last prompt.

    chunks: how LMCache split the prompt. looked_up: tokens up to the end of the last chunk that its lookup found (0
        after a miss at the first chunk). reused_tokens: tokens of loaded chunks, gaps left out.
    blended: None where nothing was loaded or the mode is `prefill`.
    provenance: for every prompt segment that lies in a loaded chunk. writes, evictions: in the order of the ledger;
        `content_id` hashes the chunk's token ids as those of segments are.
    untimed_seconds: what the observation cost, `Policy.untimed_seconds` among it; no part of TTFT.
    decided: how many positions a watched policy chose that another rounding would not have chosen; None for others.
    failure: the policy's error. errors: what made this no proper serve (LMCache absent, a lookup that timed out, a
        load that fell short). An engine refuses a record that has either. warnings: what else LMCache's log said.
    """

    request_id: str
    part: Part
    mode: Mode
    chunks: tuple[Chunk, ...] = ()
    looked_up: int = 0
    reused_tokens: int = 0
    blended: Blended | None = None
    provenance: tuple[Provenance, ...] = ()
    writes: tuple[Write, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    rows: Rows | None = None
    untimed_seconds: float = 0.0
    decided: int | None = None
    failure: Failure | None = None
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def packed(self) -> bytes:
        return pickle.dumps(self)

    @classmethod
    def unpacked(cls, packed: bytes) -> Record:
        return _of(cls, packed)


def _of(kind: type[T], packed: bytes) -> T:
    made = pickle.loads(packed)
    if not isinstance(made, kind):
        raise TypeError(f"a {kind.__name__} was expected, not a {type(made).__name__}")
    return made


@contextmanager
def _by_value() -> Iterator[None]:
    """Within it, classes out of a user's policy files are pickled with their code."""
    import cloudpickle

    modules = [module for name, module in sys.modules.items() if name.startswith(POLICY_FILES)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
