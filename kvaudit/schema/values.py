"""The words that columns hold, each with its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "control": {
            "none": "the cache is emptied once, before the arm's first request, and history is kept from there",
            "reset": "the cache is emptied before each request (its prelude is still served): no history",
            "repeat": "the same order once more from an empty cache: it must reproduce every answer",
            "rounding": "the same order once more, the signals that the policy ranks by moved within their rounding: "
            "what changes would change with another device or number of threads",
        },
        "policy": {
            "full-prefill": "the whole prompt is computed and nothing is reused: the reference",
            "as-served": "what a server, or an engine that takes no policy, does with its cache by itself",
            "any other": "a recomputation policy; `kvaudit policies` lists them",
        },
        "order": {
            "chronological": "as the requests really came",
            "reversed": "backwards",
            "shuffle-N": "a random permutation, rebuilt from `order_seed`",
        },
        "segments.kind": {
            "instruction": "what stands before all documents, a system prompt for instance",
            "document": "a document, or a row of a table",
            "message": "a chat message",
            "tool-result": "what a tool returned",
            "query": "what is asked",
            "separator": "what stands between documents; it is no cache entry of its own",
            "glue": "what a chat template puts around messages; it is no cache entry of its own",
        },
        "part, writer_part": {
            "prelude": "a prompt served before the request itself and belonging to it",
            "request": "the request itself",
        },
        "finish_reason": {
            "stop": "an end token or a stop text came",
            "length": "the token limit was reached",
            "any other": "as the engine says",
        },
        "comparisons.kind": {
            "reference": "full prefill (left) and an arm of a policy (right), any control",
            "orders": "two orders of the same policy: their disagreement is history",
            "repeat": "an arm (left) and its repeat control (right)",
            "rounding": "an arm (left) and its rounding control (right)",
            "noise": "full prefill (left) and its second run (right): their disagreement is the noise floor",
        },
    }
)
