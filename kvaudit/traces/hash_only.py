"""Traces that hold lengths and hashes of prefixes in place of prompts: Mooncake's lines and WEKA's sessions.

They tell what a prefix cache could have reused. Without the prompts no model can be asked, and no answer audited.
"""

from __future__ import annotations

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.logs import document_beginning_with, first_record
from kvaudit.traces.shapes import as_object, as_objects
from kvaudit.traces.source import NotThisFormatError, TraceSource

MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}\n'
WEKA = (
    '{"id": "s", "models": ["m"], "block_size": 64, "requests": [{"t": 0.0, "type": "n", "in": 600, "out": 9, '
    '"hash_ids": [1, 2]}]}'
)


class HashesOnlyError(TraceError):
    """A trace without prompts."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(
            f"{name} is a {kind} trace: lengths and hashes of prefixes without the prompts, so that no answer can be "
            "audited",
            "record the prompts too, with kvaudit record proxy or from a log that holds them",
        )


def read_mooncake(source: TraceSource) -> Trace:
    """Raises HashesOnlyError for a Mooncake trace, NotThisFormatError for any other."""
    if not {"hash_ids", "input_length"} <= first_record(source).keys():
        raise NotThisFormatError("the first line has no 'hash_ids' and 'input_length'")
    raise HashesOnlyError(source.name, "Mooncake")


def read_weka(source: TraceSource) -> Trace:
    """Raises HashesOnlyError for a WEKA trace, NotThisFormatError for any other."""
    keys = ("id", "models", "block_size", "requests", "hash_id_scope", "tool_tokens", "system_tokens")
    requests = as_objects(as_object(document_beginning_with(source, keys)).get("requests"))
    if not any("hash_ids" in request for request in requests):
        raise NotThisFormatError("it has no 'requests' with 'hash_ids'")
    raise HashesOnlyError(source.name, "WEKA")
