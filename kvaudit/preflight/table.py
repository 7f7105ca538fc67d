"""One row a request: what each cache could reuse of it, as Parquet under a fixed Arrow schema.

| column | |
| --- | --- |
| request_id, ordinal, session | the request, its place in the trace from 0, its session |
| segments | pieces of its prompt, template glue among them; null where the trace has no prompts |
| prompt_tokens, prelude_tokens | tokens of its prompt, and of the prompts served before it |
| vllm_reused, sglang_reused | tokens an exact prefix cache had; null where the prompt does not fit into it |
| chunk_reused_any, chunk_reused_stop_at_miss | tokens in chunks cached at any position, and up to the first miss; |
| | null where the trace has no prompts |
| break_segment, break_kind | where the cached prefix ends: segment (from 1; null for template glue), its kind; |
| | block and its number where the trace has no prompts |
| break_token | tokens of the prompt before that |
| break_how | empty: nothing cached; differs; extends: an earlier prompt ended there; evicted |
| prefix_from | the request that brought the prefix |

The break columns are null where the whole prompt was cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from kvaudit.preflight.reuse import RequestReuse
from kvaudit.traces.output import whole_file

SCHEMA_VERSION = 1
ROWS_A_GROUP = 16_384

_text, _int = pa.string(), pa.int64()
SCHEMA = pa.schema(
    [
        pa.field("request_id", _text, nullable=False),
        pa.field("ordinal", _int, nullable=False),
        pa.field("session", _text),
        pa.field("segments", _int),
        pa.field("prompt_tokens", _int, nullable=False),
        pa.field("prelude_tokens", _int, nullable=False),
        pa.field("vllm_reused", _int),
        pa.field("sglang_reused", _int),
        pa.field("chunk_reused_any", _int),
        pa.field("chunk_reused_stop_at_miss", _int),
        pa.field("break_segment", _int),
        pa.field("break_kind", _text),
        pa.field("break_token", _int),
        pa.field("break_how", _text),
        pa.field("prefix_from", _text),
    ]
)
_PLAIN = tuple(name for name in SCHEMA.names if not name.startswith(("break_", "prefix_")))


class ReuseTable:
    """Takes rows as they come and writes them in groups."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[dict[str, object]] = []

    def add(self, reuse: RequestReuse) -> None:
        self._rows.append(as_row(reuse))
        if len(self._rows) >= ROWS_A_GROUP:
            self.flush()

    def flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows = []


@contextmanager
def reuse_table(path: Path, about: Mapping[str, str]) -> Iterator[ReuseTable]:
    """A table that is at `path` when the block ends without an error. `about` goes into the footer.

    Raises TraceError where the file cannot be written.
    """
    footer = {"kvaudit_table": "reuse", "schema_version": str(SCHEMA_VERSION), **about}
    with (
        whole_file(path) as stream,
        pq.ParquetWriter(stream, SCHEMA.with_metadata(footer), compression="zstd", write_page_checksum=True) as writer,
    ):
        table = ReuseTable(writer)
        yield table
        table.flush()


def as_row(reuse: RequestReuse) -> dict[str, object]:
    """The row of one request, column by column."""
    broken = reuse.broken
    return {name: getattr(reuse, name) for name in _PLAIN} | {
        "break_segment": broken and broken.segment,
        "break_kind": broken and broken.kind,
        "break_token": broken and broken.token,
        "break_how": broken and broken.how,
        "prefix_from": broken and broken.prefix_from,
    }
