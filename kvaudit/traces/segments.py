"""Segments by their content: ids, interning, and the digest of what a trace replays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from operator import attrgetter

import orjson

from kvaudit.errors import TraceError
from kvaudit.records import KINDS, Request, Segment
from kvaudit.traces.id_lists import ListedPrompt

_ID_DIGITS = 16
_content_id = attrgetter("content_id")


def make_segment(kind: str, text: str, role: str | None = None, token_ids: tuple[int, ...] | None = None) -> Segment:
    """A segment under its content id. Raises TraceError for an unknown kind and for text with a lone surrogate."""
    if kind not in KINDS:
        raise TraceError(f"{kind!r:.80} is no kind of segment", f"kinds: {', '.join(KINDS)}")
    return Segment(kind, _full_hash(kind, text, role, token_ids)[:_ID_DIGITS], text, role, token_ids)


def _full_hash(kind: str, text: str, role: str | None, token_ids: tuple[int, ...] | None) -> str:
    """SHA-256 of kind, role, token ids (decimal, with commas) and text, with a zero byte between them."""
    ids = "" if token_ids is None else ",".join(map(str, token_ids))
    try:
        return sha256(f"{kind}\0{role or ''}\0{ids}\0{text}".encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise TraceError(
            f"a text holds half of a surrogate pair (U+{ord(error.object[error.start]):04X}), which is no character"
        ) from error


class SegmentPool:
    """Equal content is one Segment object, however often it recurs."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, str, str | None, tuple[int, ...] | None], Segment] = {}

    def intern(
        self, kind: str, text: str, role: str | None = None, token_ids: tuple[int, ...] | None = None
    ) -> Segment:
        key = (kind, text, role, token_ids)
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = make_segment(kind, text, role, token_ids)
        return segment


class TraceDigest:
    """SHA-256 over what is replayed and what a run keeps of it: ids, segments, preludes, limits, stop strings,
    sessions, expected answers, times and extra fields, in their order.
    """

    def __init__(self) -> None:
        self._hash = sha256(b"kvaudit trace 1")
        self._seen: set[str] = set()

    def add(self, request: Request, listed: ListedPrompt | None = None) -> None:
        """Add a request. Of one that was read as `listed` the prompt is known already, the same as of the request."""
        ids = self._prompt(request.segments) if listed is None else self._listed(listed)
        asked = [request.request_id, request.max_tokens, request.stop, request.chat, ids]
        asked.append(list(map(self._prompt, request.prelude)))
        kept = [request.session, request.expected, request.timestamp, *([request.extra] if request.extra else [])]
        self._hash.update(b"\n" + orjson.dumps([*asked, *kept]))

    def _prompt(self, segments: Sequence[Segment]) -> list[str]:
        ids = list(map(_content_id, segments))
        if not self._seen.issuperset(ids):
            self._add_segments(segments)
        return ids

    def _listed(self, listed: ListedPrompt) -> orjson.Fragment:
        self._add_segments(listed.fresh)
        return orjson.Fragment(listed.json)

    def _add_segments(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if segment.content_id not in self._seen:
                self._seen.add(segment.content_id)
                whole = _full_hash(segment.kind, segment.text, segment.role, segment.token_ids)
                self._hash.update(f"\n{segment.content_id}={whole}".encode())

    @property
    def distinct_segments(self) -> int:
        return len(self._seen)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
