"""The Arrow schemas of a run's tables (DESIGN 6). Nullable columns are always present, types are never inferred."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pyarrow as pa

SCHEMA_VERSION = 1

_text, _int, _real, _flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()


def _schema(required: dict[str, pa.DataType], optional: dict[str, pa.DataType]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in required.items()]
        + [pa.field(name, kind) for name, kind in optional.items()]
    )


def _list_of(**columns: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(list(columns.items())))


# `observations.error` is for engines that answer over a network, where one request may fail and the arm goes on.
TABLES: Mapping[str, pa.Schema] = MappingProxyType(
    {
        "requests": _schema(
            {
                "request_id": _text,
                "ordinal": _int,
                "prompt_tokens": _int,
                "segments": _list_of(kind=_text, content_id=_text, start=_int, end=_int),
            },
            {"session": _text, "expected": _text, "timestamp": _real},
        ),
        "observations": _schema(
            {
                "arm_id": _text,
                "engine": _text,
                "policy": _text,
                "order": _text,
                "control": _text,
                "position": _int,
                "request_id": _text,
                "prompt_tokens": _int,
            },
            {
                "order_seed": _int,
                "answer_text": _text,
                "answer_ids": pa.list_(pa.int32()),
                "finish_reason": _text,
                "ttft_ms": _real,
                "total_ms": _real,
                "reused_tokens": _int,
                "reusable_tokens": _int,
                "recomputed_tokens": _int,
                "budget_k": _int,
                "prelude_reused_tokens": _int,
                "first_reused_tokens": _int,
                "cache_entries_before": _int,
                "fragmentation": _int,
                "captured_deviation": _real,
                "kl": _real,
                "reference_logprob": _real,
                "first_difference": _int,
                "margin": _real,
                "error": _text,
            },
        ),
        "selections": _schema(
            {
                "arm_id": _text,
                "request_id": _text,
                "layer": _int,
                "spans": _list_of(start=_int, end=_int, deviation=_real),
                "total_deviation": _real,
            },
            {},
        ),
        "provenance": _schema(
            {
                "arm_id": _text,
                "request_id": _text,
                "segment": _int,
                "content_id": _text,
                "writer_request_id": _text,
                "writer_part": _text,
                "write_ordinal": _int,
                "old_position": _int,
                "new_position": _int,
                "context_hash_written": _text,
                "context_hash_now": _text,
            },
            {},
        ),
        "writes": _schema(
            {
                "arm_id": _text,
                "request_id": _text,
                "part": _text,
                "content_id": _text,
                "write_ordinal": _int,
                "position": _int,
                "tokens": _int,
                "context_hash": _text,
                "computed_over": pa.list_(_int),
                "size_bytes": _int,
            },
            {},
        ),
        "evictions": _schema(
            {
                "arm_id": _text,
                "request_id": _text,
                "part": _text,
                "content_id": _text,
                "write_ordinal": _int,
                "size_bytes": _int,
            },
            {},
        ),
        "references": _schema(
            {
                "request_id": _text,
                "generated_ids": pa.list_(pa.int32()),
                "top_ids": pa.list_(pa.list_(pa.int32())),
                "top_logprobs": pa.list_(pa.list_(pa.float32())),
            },
            {},
        ),
        "comparisons": _schema(
            {"kind": _text, "policy": _text, "request_id": _text, "left": _text, "right": _text, "equal": _flag},
            {"edit_distance": _int},
        ),
        "summary": _schema(
            {"metric": _text},
            {
                "policy": _text,
                "order": _text,
                "control": _text,
                "value": _real,
                "low": _real,
                "high": _real,
                "n": _int,
                "test": _text,
                "p_value": _real,
                "p_adjusted": _real,
                "discordant_left": _int,
                "discordant_right": _int,
            },
        ),
    }
)
