"""Every table of a run: what a row is, and each column's type and meaning, side by side so that neither can drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow as pa

_text, _int, _real, _flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_ids = pa.list_(pa.int32())


@dataclass(frozen=True, slots=True)
class Column:
    """`meaning` is one line: what the value is, its unit, and what null says where the column may be null."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class Table:
    """`row` says what a row is."""

    row: str
    columns: tuple[Column, ...]

    @property
    def by_arm(self) -> bool:
        """Whether every arm has a file of its own in a run folder."""
        return any(column.name == "arm_id" for column in self.columns)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.type, nullable=column.nullable) for column in self.columns])


def _always(name: str, kind: pa.DataType, meaning: str) -> Column:
    return Column(name, kind, meaning, nullable=False)


def _or_null(name: str, kind: pa.DataType, meaning: str) -> Column:
    return Column(name, kind, meaning, nullable=True)


def _list_of(**columns: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(list(columns.items())))


_ARM = _always("arm_id", _text, "the arm: POLICY.ORDER, with .CONTROL at its end unless the control is none")
_SERVED = _always("request_id", _text, "the request, as in `requests`")
_PART = _always("part", _text, "whether the request's prelude or the request itself was being served")
_CONTENT = _always("content_id", _text, "hash of the segment's token ids: the identity of a cache entry")

_REQUESTS = Table(
    "a request of the trace, as the prompt that every arm is given",
    (
        _always("request_id", _text, "the trace's name for the request, unique in it"),
        _always("ordinal", _int, "place in the order in which the requests really came, from 0"),
        _always(
            "prompt_tokens",
            _int,
            "length of the prompt in tokens, of a server in bytes, without its prelude",
        ),
        _always(
            "segments",
            _list_of(kind=_text, content_id=_text, start=_int, end=_int),
            "the prompt's tiling in order: kind, hash of the token ids, positions from start up to, not including, end",
        ),
        _or_null(
            "session", _text, "the conversation or stream that the request belongs to; null: the trace names none"
        ),
        _or_null("expected", _text, "the right answer; null: the trace knows none"),
        _or_null("timestamp", _real, "when the request came, in seconds as the trace counts them; null: not recorded"),
    ),
)
_OBSERVATIONS = Table(
    "what one request did in one arm",
    (
        _ARM,
        _always("engine", _text, "name of the engine that served it"),
        _always("policy", _text, "the recomputation policy, or full-prefill, which reuses nothing"),
        _always("order", _text, "the order in which the arm serves the requests"),
        _always("control", _text, "what the arm does with the cache between requests"),
        _always("position", _int, "place in the arm's order, from 0; 0 is served from an empty cache and is warm-up"),
        _SERVED,
        _always("prompt_tokens", _int, "length of the prompt in tokens as the engine counts it"),
        _or_null("order_seed", _int, "seed of a shuffle; null: the order needs none"),
        _or_null("answer_text", _text, "the answer, without the stop text; null: the engine gave none"),
        _or_null("answer_ids", _ids, "token ids of the answer; null: the engine shows none"),
        _or_null("finish_reason", _text, "why the answer ended; null: not known"),
        _or_null("ttft_ms", _real, "time to the first token, milliseconds; null: not measured"),
        _or_null(
            "total_ms",
            _real,
            "time to the whole answer, milliseconds; null: not measured, or checked in one pass without decoding",
        ),
        _or_null(
            "reused_tokens",
            _int,
            "prompt tokens loaded from entries that existed before the prompt came; null: the engine does not say",
        ),
        _or_null("reusable_tokens", _int, "tokens that the policy could choose from, N; null: the engine does not say"),
        _or_null("recomputed_tokens", _int, "reusable tokens that were recomputed; null: the engine does not say"),
        _or_null("budget_k", _int, "reusable tokens that had to be recomputed, k; null: the engine does not say"),
        _or_null(
            "prelude_reused_tokens", _int, "tokens that the prelude's prompts reused; null: no prelude was served"
        ),
        _or_null(
            "first_reused_tokens",
            _int,
            "tokens that the first prompt served for this request reused, a prelude's included; null: unknown",
        ),
        _or_null(
            "cache_entries_before",
            _int,
            "cache entries that the engine reported after it was emptied (of a server: whether a probe was served from "
            "the cache afterwards, 1 or 0); null: not emptied here, or it cannot say",
        ),
        _or_null(
            "fragmentation", _int, "maximal runs of neighbouring positions recomputed; null: nothing was reusable"
        ),
        _or_null(
            "captured_deviation",
            _real,
            "share, 0 to 1, of the summed token deviation that was recomputed; null: there was no deviation",
        ),
        _or_null(
            "kl",
            _real,
            "KL divergence of this run from full prefill along its answer, mean over tokens, nats; null: not measured",
        ),
        _or_null(
            "reference_logprob",
            _real,
            "summed log-probability of the full-prefill answer in this run, nats; null: not measured",
        ),
        _or_null(
            "first_difference",
            _int,
            "index of the first token that is not full prefill's; null: no token differs, or the arm is the reference",
        ),
        _or_null(
            "margin",
            _real,
            "the two best logits' difference where the answer leaves full prefill's, else the smallest along it; "
            "null: not known",
        ),
        _or_null(
            "rounding_tokens",
            _int,
            "tokens recomputed, the prelude's too, that the policy would not have chosen with signals rounded "
            "otherwise; null: it ranks by none, or nobody looked",
        ),
        _or_null(
            "attempts",
            _int,
            "the most often that the request, or a prompt of its prelude, was sent to a server; more than 1 changes "
            "the history; null: the engine is no server",
        ),
        _or_null("error", _text, "why the request has no answer; null: it has one"),
    ),
)
_SELECTIONS = Table(
    "the tokens that a policy recomputed for one request in one arm; no row where nothing was reusable",
    (
        _ARM,
        _SERVED,
        _always("layer", _int, "the layer at which the policy chose, from 0"),
        _always(
            "spans",
            _list_of(start=_int, end=_int, deviation=_real),
            "maximal runs of recomputed positions, from start up to, not including, end, and their summed deviation",
        ),
        _always(
            "total_deviation",
            _real,
            "summed deviation of all reusable tokens: squared L2 distance of current from cached keys or values",
        ),
    ),
)
_PROVENANCE = Table(
    "a reused segment of one request in one arm, and where its cached keys and values came from",
    (
        _ARM,
        _SERVED,
        _always("segment", _int, "index of the segment in the prompt, as in `requests.segments`, from 0"),
        _CONTENT,
        _always("writer_request_id", _text, "the request whose serving wrote the cache entry"),
        _always("writer_part", _text, "whether that request's prelude or the request itself wrote it"),
        _always(
            "write_ordinal",
            _int,
            "the write that made the entry, as in `writes`; under the reset control only unique within a request",
        ),
        _always("old_position", _int, "prompt position of the segment's first token when it was written"),
        _always("new_position", _int, "prompt position of the segment's first token now"),
        _always("context_hash_written", _text, "hash of the token ids before the segment when it was written"),
        _always("context_hash_now", _text, "hash of the token ids before the segment now; equal: the same context"),
    ),
)
_WRITES = Table(
    "a cache entry as it was written",
    (
        _ARM,
        _always("request_id", _text, "the request whose serving wrote the entry"),
        _PART,
        _CONTENT,
        _always("write_ordinal", _int, "number of the write since the cache was last emptied"),
        _always("position", _int, "prompt position of the segment's first token"),
        _always("tokens", _int, "length of the segment in tokens"),
        _always("context_hash", _text, "hash of the token ids before the segment"),
        _always(
            "computed_over",
            pa.list_(_int),
            "write ordinals of the reused entries before it in the prompt: what it inherits errors from",
        ),
        _always("size_bytes", _int, "size of the entry's keys and values, bytes"),
    ),
)
_EVICTIONS = Table(
    "a cache entry that made room for another",
    (
        _ARM,
        _always("request_id", _text, "the request whose serving needed the room"),
        _PART,
        _CONTENT,
        _always("write_ordinal", _int, "the write that had made the entry, as in `writes`"),
        _always("size_bytes", _int, "size of the entry's keys and values, bytes"),
    ),
)
_REFERENCES = Table(
    "the full-prefill answer of a request, which every other arm is held against",
    (
        _SERVED,
        _always("generated_ids", _ids, "all token ids that greedy decoding produced, a stop or end token included"),
        _always(
            "top_ids", pa.list_(_ids), "per generated token the likeliest token ids, likeliest first; may be empty"
        ),
        _always("top_logprobs", pa.list_(pa.list_(pa.float32())), "natural log-probabilities of `top_ids`"),
    ),
)
_COMPARISONS = Table(
    "two arms' answers to one request held against each other; no row where either side has no answer",
    (
        _always("kind", _text, "which comparison it is"),
        _always("policy", _text, "the policy under test, or full-prefill"),
        _SERVED,
        _always("left", _text, "arm_id of the first answer: full prefill, the earlier order, or the original"),
        _always("right", _text, "arm_id of the second answer"),
        _always("equal", _flag, "whether both answers have the same token ids and the same text, as far as given"),
        _or_null("edit_distance", _int, "Levenshtein distance in characters, 0 where equal; null: not measured"),
    ),
)
_SUMMARY = Table(
    "a figure of the audit",
    (
        _always("metric", _text, "which figure it is"),
        _or_null("policy", _text, "the policy, or the two that are compared as `a - b`; null: it is of no one policy"),
        _or_null("order", _text, "the order, or the two that are compared as `a - b`; null: it is over orders"),
        _or_null("control", _text, "the control of the arms behind it; null: not of one control"),
        _or_null("value", _real, "the figure, in the metric's unit; null: nothing was there to measure"),
        _or_null("low", _real, "lower end of the 95 % interval, or the quartile that `test` names; null: none"),
        _or_null("high", _real, "upper end of the 95 % interval, or the quartile that `test` names; null: none"),
        _or_null("n", _int, "how many requests, times or policies are behind it; null: not counted"),
        _or_null("test", _text, "how the interval and the p-value were made; null: neither is there"),
        _or_null("p_value", _real, "p-value before any adjustment; null: nothing was tested"),
        _or_null("p_adjusted", _real, "p-value after Holm over all rows of the metric; null: nothing was tested"),
        _or_null("discordant_left", _int, "requests on which only the first of the two was right; null: no pair"),
        _or_null("discordant_right", _int, "requests on which only the second of the two was right; null: no pair"),
    ),
)

DOCUMENTED: Mapping[str, Table] = MappingProxyType(
    {
        "requests": _REQUESTS,
        "observations": _OBSERVATIONS,
        "selections": _SELECTIONS,
        "provenance": _PROVENANCE,
        "writes": _WRITES,
        "evictions": _EVICTIONS,
        "references": _REFERENCES,
        "comparisons": _COMPARISONS,
        "summary": _SUMMARY,
    }
)
