"""How LMCache splits a prompt, held against the trace's own segments."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvaudit.engines import Tokenizer
from kvaudit.engines.vllm.worker.job import Record
from kvaudit.errors import EngineError
from kvaudit.models.fetch import announce
from kvaudit.records import GAP_KINDS, SEPARATOR, Prompt


@dataclass(slots=True)
class Chunking:
    """`separator` are the token ids at which LMCache splits, `chunk_tokens` is its chunk size."""

    separator: tuple[int, ...]
    chunk_tokens: int
    tokenizer: Tokenizer
    _told: set[str] = field(default_factory=set)

    def check(self, request_id: str, prompt: Prompt) -> None:
        """Raise EngineError for a prompt whose separators are not LMCache's: it would not split there."""
        for segment in prompt.segments:
            ids = prompt.token_ids[segment.start : segment.end]
            if segment.kind == SEPARATOR and ids != self.separator:
                text = self.tokenizer.decode(ids)
                raise EngineError(
                    f"request {request_id!r} has separators of the token ids {list(ids)} ({text!r}), and LMCache "
                    f"splits at {list(self.separator)}",
                    f"give --option separator={text!r}",
                )

    def compare(self, request_id: str, prompt: Prompt, record: Record) -> None:
        """Tell once where LMCache's chunks are not the trace's segments: what is reused is another thing then."""
        segments = {(s.start, s.end) for s in prompt.segments if s.kind not in GAP_KINDS}
        chunks = {(chunk.start, chunk.end) for chunk in record.chunks if chunk.start < chunk.end}
        if not record.chunks or chunks == segments:
            return
        joined = sum(
            sum(chunk[0] <= start and end <= chunk[1] for start, end in segments) > 1 for chunk in chunks - segments
        )
        torn = sum(
            not any(chunk[0] <= start and end <= chunk[1] for chunk in chunks) for start, end in segments - chunks
        )
        what = "joins" if joined else "tears" if torn else "widens"
        if what not in self._told:
            self._told.add(what)
            announce(
                f"LMCache {_WHAT[what]}: request {request_id!r} has {len(segments)} segments and LMCache makes "
                f"{len(chunks)} chunks of them, split at the token ids {list(self.separator)} only"
                + ("; kvaudit record rolling --separator puts one between segments" if joined else "")
            )


_WHAT = {
    "joins": "takes several segments for one chunk, which is reused only where all of them recur together",
    "tears": "splits inside a segment",
    "widens": "takes what stands between segments into its chunks",
}
