"""The nouns that the stages of an audit hand to each other.

Frozen, and free of torch, files and formats: a trace becomes prompts, prompts are served in arms,
every serve is an observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Control = Literal["none", "reset", "repeat", "rounding"]
"""`none`: history is kept. `reset`: the cache is emptied before each request. `repeat`: once more from empty.
`rounding`: the same with signals that are rounded otherwise (`kvaudit.policies.rounding`)."""

REPRODUCTIONS: frozenset[Control] = frozenset({"repeat", "rounding"})
"""Controls that run an order again: held against that order, and no figure of their own otherwise."""

Part = Literal["prelude", "request"]

FULL_PREFILL = "full-prefill"
AS_SERVED = "as-served"
"""The one arm family of an engine that takes no recomputation policy: its cache in use, whatever it does with it."""

CHRONOLOGICAL = "chronological"
REVERSED = "reversed"
DEFAULT_MAX_TOKENS = 16
LARGEST_TOKEN_ID = 2**31 - 1

INSTRUCTION = "instruction"
DOCUMENT = "document"
MESSAGE = "message"
TOOL_RESULT = "tool-result"
QUERY = "query"
SEPARATOR = "separator"
GLUE = "glue"
KINDS = (INSTRUCTION, DOCUMENT, MESSAGE, TOOL_RESULT, QUERY, SEPARATOR, GLUE)
GAP_KINDS = frozenset({SEPARATOR, GLUE})
"""Segment kinds that stand between chunks: separators and what a chat template puts around messages."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt text with one origin. Equal `content_id` means equal content.

    `kind` is one of `KINDS`. `role` begins a message of a chat; there a segment without one goes on with the message
    before it. `token_ids`, when a trace carries them, replace the tokenizer.
    """

    kind: str
    content_id: str
    text: str
    role: str | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace, with the prompts that are served before it and belong to it.

    With `chat`, segments make up messages (`message_spans`) and the model's own chat template is put around these.
    `expected` is the right answer where the trace knows one. `limited` is false where the trace sets no limit and
    `max_tokens` is kvaudit's. `line` is where the trace file holds it. `extra` is a JSON object, as text, of the fields
    of the request's body that only its server understands; empty where there are none.
    """

    request_id: str
    ordinal: int
    segments: tuple[Segment, ...]
    prelude: tuple[tuple[Segment, ...], ...] = ()
    session: str | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    stop: tuple[str, ...] = ()
    chat: bool = False
    expected: str | None = None
    timestamp: float | None = None
    limited: bool = True
    line: int | None = None
    extra: str = ""


@dataclass(frozen=True, slots=True)
class HashedRequest:
    """A request of which a trace keeps lengths, in tokens, and hashes in place of the prompt.

    Each of `block_ids` stands for a block of the prompt together with all that comes before it. The last block may be
    cut short or have no id. Ids of different `namespace` have nothing to do with each other.
    """

    request_id: str
    ordinal: int
    prompt_tokens: int
    block_ids: tuple[int | str, ...]
    namespace: str = ""
    session: str | None = None
    answer_tokens: int = 0
    timestamp: float | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they really came. `digest` is SHA-256 over what is replayed and what a run keeps
    of it.
    """

    requests: tuple[Request, ...]
    digest: str
    source: str
    header: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A segment as the half-open range [start, end) of prompt positions; `content_id` hashes its token ids."""

    kind: str
    content_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Wording:
    """A prompt as a server is asked for it: the (role, content) messages of a chat, or a text, or token ids.

    `extra` as in `Request`.
    """

    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    extra: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an engine is given: token ids, tiled by segments.

    An engine without a tokenizer of ours is given the `wording`; segments then tile the bytes of its text in UTF-8, and
    `token_ids` are empty unless the trace carries them.
    """

    token_ids: tuple[int, ...]
    segments: tuple[PromptSegment, ...]
    wording: Wording | None = None

    @property
    def length(self) -> int:
        """In tokens, or in bytes where only the wording is known."""
        return self.segments[-1].end


@dataclass(frozen=True, slots=True)
class Sampling:
    """Greedy decoding with a token limit and stop strings (the stop text is not part of the answer)."""

    max_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """A permutation of a trace's requests: `permutation[i]` is the ordinal served at position i."""

    name: str
    seed: int | None
    permutation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """One run over the trace that begins with an empty cache and shares state with no other."""

    policy: str
    order: Order
    control: Control

    @property
    def arm_id(self) -> str:
        return f"{self.policy}.{self.order.name}" + ("" if self.control == "none" else f".{self.control}")


@dataclass(frozen=True, slots=True)
class Reference:
    """A full-prefill answer, and what is needed to hold another run against it.

    `generated_ids` are all T tokens that greedy decoding produced, a stop or end token included.
    `top_ids` and `top_logprobs` give, per generated token, the C likeliest token ids and their natural
    log-probabilities (T rows of C, likeliest first); empty where an engine shows none.
    """

    generated_ids: tuple[int, ...]
    top_ids: Sequence[Sequence[int]] = ()
    top_logprobs: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """The reusable positions that a policy recomputed.

    `layer` is where the policy began to select: what it selected was recomputed from there on. `spans` are maximal runs
    [start, end) of prompt positions, `deviation` the summed token deviation in each (float32 squared L2 distance of
    keys over all KV heads), `total_deviation` the sum over all reusable tokens. The deviation is that at the engine's
    check layer whatever `layer` is, so that policies can be compared. Of a policy that narrows its selection layer by
    layer, `spans` hold the tokens that were recomputed at the last layer too.
    """

    layer: int
    spans: tuple[tuple[int, int], ...]
    deviation: tuple[float, ...]
    total_deviation: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a reused segment's cached KV came from (the ledger's answer, DESIGN 5).

    `segment` indexes the prompt's segments, positions are those of its first token. Context hashes cover the
    token ids before it. `write_ordinal` names the write (`Write`) that made the entry.
    """

    segment: int
    content_id: str
    writer_request_id: str
    writer_part: Part
    write_ordinal: int
    old_position: int
    new_position: int
    context_hash_written: str
    context_hash_now: str


@dataclass(frozen=True, slots=True)
class Write:
    """One cache entry as it was written. `write_ordinal` counts writes since the last reset.

    `computed_over` holds the write ordinals of the reused entries before it in the prompt that wrote it.
    """

    content_id: str
    write_ordinal: int
    position: int
    tokens: int
    context_hash: str
    computed_over: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """A cache entry that made room for another."""

    content_id: str
    write_ordinal: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine says about one prompt that it served. Times in milliseconds, None where unknown.

    `total_ms` is None too where the answer was checked in one pass in place of decoding it step by step.
    `attempts`: how often a request had to be sent to a server; None where nothing is sent.

    `reused_tokens` were loaded from entries that existed before this prompt came; `reusable_tokens` is N, what the
    policy could choose from; `recomputed_tokens` is how many of them it chose (of a selection that narrows,
    the mean over the layers from its first on); `budget_k` what it had to choose.
    `kl` is the mean over the reference answer's tokens of KL(full prefill || this run) in nats,
    `reference_logprob` the summed log-probability of that answer in this run, `margin` the difference of the two
    best logits where the answer first leaves the reference (else the smallest margin along it).
    """

    answer_ids: tuple[int, ...]
    answer_text: str
    finish_reason: str
    prompt_tokens: int
    ttft_ms: float | None = None
    total_ms: float | None = None
    reused_tokens: int | None = 0
    reusable_tokens: int | None = 0
    recomputed_tokens: int | None = 0
    budget_k: int | None = 0
    selection: Selection | None = None
    provenance: tuple[Provenance, ...] = ()
    writes: tuple[Write, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    kl: float | None = None
    reference_logprob: float | None = None
    margin: float | None = None
    reference: Reference | None = None
    attempts: int | None = None


@dataclass(frozen=True, slots=True)
class CacheState:
    """What an engine reports of its cache. None where it cannot say.

    Of a server that only a probe can ask, `entries` is 1 where the probe found itself in the cache, else 0.
    """

    entries: int | None
    size_bytes: int | None


def message_spans(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """The messages of a chat's prompt as half-open ranges of its segments, whose texts joined are their contents."""
    starts = [index for index, segment in enumerate(segments) if segment.role is not None or not index]
    return list(zip(starts, [*starts[1:], len(segments)], strict=True))


def spoken_spans(segments: Sequence[Segment], chat: bool) -> list[tuple[int, int]]:
    """Ranges of a prompt's segments that follow each other with nothing in between: the messages of a chat, or all."""
    return message_spans(segments) if chat else [(0, len(segments))]


def messages_of(segments: Sequence[Segment]) -> list[tuple[str, str]]:
    """(role, content) of each message of a chat's prompt."""
    return [
        (segments[start].role or "user", "".join(segment.text for segment in segments[start:end]))
        for start, end in message_spans(segments)
    ]


def runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs [start, end) of neighbouring positions; `positions` ascending and distinct."""
    start = previous = None
    for position in positions:
        if previous is None or position != previous + 1:
            if start is not None and previous is not None:
                yield start, previous + 1
            start = position
        previous = position
    if start is not None and previous is not None:
        yield start, previous + 1
