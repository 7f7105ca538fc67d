"""kvaudit's own traces: JSON lines in which every segment is written once and referred to by its content id.

A header line, then, in any order in which a segment comes before its use:
`{"segment": content_id, "kind": ..., "text": ..., "role": ..., "token_ids": [...]}` and
`{"request": id, "segments": [...], "prelude": [[...], ...], "session": ..., "max_tokens": ..., "stop": [...],
"expected": ..., "timestamp": seconds, "chat": ..., "extra": {...}}`, where a segment is a content id or, written by
hand, an object with `kind` and `text`. In a chat `role` begins a message, and a segment without one goes on with it.
`extra` are fields of the body for servers that know them, tools among them, and nothing that stands elsewhere. The
header may be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import orjson

from kvaudit.records import DEFAULT_MAX_TOKENS, KINDS, Request, Segment, Trace
from kvaudit.traces.assembly import build_trace, sound_requests
from kvaudit.traces.extras import not_extra
from kvaudit.traces.fields import Fields, brief
from kvaudit.traces.id_lists import LISTED, IdLists, ListedPrompt
from kvaudit.traces.segments import SegmentPool
from kvaudit.traces.shapes import parsed
from kvaudit.traces.source import NotThisFormatError, TraceSource, is_blank

NAME = "kvaudit"
"""Under which `plugins.py` lists this format."""
VERSION = 1
HEADER = "kvaudit_trace"

_CONTENT_FIELDS = ("kind", "text", "role", "token_ids")
_SEGMENT_FIELDS = ("segment", *_CONTENT_FIELDS)
_PLAIN_FIELDS = len(("segment", "kind", "text"))
_REQUEST_FIELDS = (
    "request",
    "segments",
    "prelude",
    "session",
    "max_tokens",
    "stop",
    "expected",
    "timestamp",
    "chat",
    "extra",
)


def read(source: TraceSource) -> Trace:
    """Read a native trace. Raises NotThisFormatError, or TraceError with file and line."""
    _require_native(source)
    header: dict[str, object] = {}
    lines = _Lines(source, header)
    return build_trace(source, lines.requests(), header, lines.blanks, lines.listed)


def iter_native(source: TraceSource, header: dict[str, object]) -> Iterator[Request]:
    """The requests of `read`, as they are read; `header` is filled with the trace's.

    Raises NotThisFormatError at once, TraceError where it is met.
    """
    _require_native(source)
    lines = _Lines(source, header)
    return sound_requests(source, lines.requests(), lines.blanks)


def _require_native(source: TraceSource) -> None:
    first = source.first_object()
    if not (first.keys() & {HEADER, "segment"} or _names_a_request(first)):
        raise NotThisFormatError(f"the first line has none of {HEADER!r}, 'segment' and the id of a 'request'")


def _names_a_request(values: dict[str, Any]) -> bool:
    """Whether `request` is an id, as here, and not the body of a request, as in logs of others."""
    return "request" in values and "exchange" not in values and type(parsed(values["request"])) is not dict


class _Lines:
    def __init__(self, source: TraceSource, header: dict[str, object]) -> None:
        self._source, self._header = source, header
        self._pool = SegmentPool()
        self._by_id: dict[str, Segment] = {}
        self._lists = IdLists(self._by_id)
        self._listed: ListedPrompt | None = None
        self._blanks = False

    def blanks(self) -> bool:
        """Whether a segment without text has been read."""
        return self._blanks

    def listed(self) -> ListedPrompt | None:
        """How the prompt of the latest request was written, where it was a plain list of ids."""
        return self._listed

    def requests(self) -> Iterator[Request]:
        ordinal, is_first = 0, True
        for line, content in self._source.lines():
            self._listed = self._lists.read(content) if content.startswith(LISTED) else None
            if self._listed is None and is_blank(content):
                continue
            values = self._listed.values if self._listed else self._source.object_of(line, content)
            if "request" in values:
                yield self._request(line, ordinal, values)
                ordinal += 1
            elif "segment" in values:
                self._define(line, values)
            elif HEADER in values and is_first:
                self._take_header(line, values)
            else:
                what = "a second header" if HEADER in values else "neither a segment nor a request"
                raise self._source.error(line, what)
            is_first = False

    def _take_header(self, line: int, values: dict[str, Any]) -> None:
        version = values[HEADER]
        if type(version) is not int or version < 1:
            raise self._source.error(line, f"{HEADER!r} is not a version number")
        if version > VERSION:
            raise self._source.error(
                line, f"the trace has version {version}, and this kvaudit reads up to {VERSION}", "upgrade kvaudit"
            )
        self._header.update(values)

    def _define(self, line: int, values: dict[str, Any]) -> None:
        kind, text = values.get("kind"), values.get("text")
        if len(values) == _PLAIN_FIELDS and kind in KINDS and type(text) is str and text:
            segment = self._pool.intern(kind, text)
        else:
            fields = self._defined(line, values)
            fields.refuse_others(_SEGMENT_FIELDS)
            segment = self._segment(fields)
        if values["segment"] != segment.content_id:
            raise self._defined(line, values).error(
                f"has the content of {segment.content_id}", "the trace was changed or damaged"
            )
        if self._by_id.setdefault(segment.content_id, segment) is not segment:
            raise self._defined(line, values).error("shares its id with another content", "record the trace again")

    def _defined(self, line: int, values: dict[str, Any]) -> Fields:
        return Fields(self._source, line, values, f"segment {brief(values['segment'])}")

    def _segment(self, fields: Fields) -> Segment:
        kind = fields.text("kind")
        if kind not in KINDS:
            raise fields.error(f"has the kind {brief(kind)}", f"kinds: {', '.join(KINDS)}")
        text, token_ids = fields.text("text"), fields.token_ids()
        if text is None and token_ids is None:
            raise fields.error("has no 'text'")
        self._blanks = self._blanks or not text
        return self._pool.intern(kind, text or "", fields.name("role"), token_ids)

    def _request(self, line: int, ordinal: int, values: dict[str, Any]) -> Request:
        fields = Fields(self._source, line, values, f"request {brief(values['request'])}")
        fields.refuse_others(_REQUEST_FIELDS)
        request_id, max_tokens = fields.name("request"), fields.count("max_tokens")
        if request_id is None:
            raise fields.error("has no id")
        return Request(
            request_id=request_id,
            ordinal=ordinal,
            segments=self._listed.segments if self._listed else self._prompt(line, fields, fields.list("segments")),
            prelude=tuple(self._prompt(line, fields, prompt) for prompt in fields.list("prelude")),
            session=fields.name("session"),
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            stop=fields.stop(),
            chat=fields.flag("chat"),
            expected=fields.text("expected"),
            timestamp=fields.number("timestamp"),
            limited=max_tokens is not None,
            line=line,
            extra=self._extra(fields),
        )

    def _extra(self, fields: Fields) -> str:
        extra = fields.object("extra")
        if extra and (known := not_extra(orjson.loads(extra))):
            raise fields.error(
                f"has {', '.join(known)} in its 'extra'",
                "a prompt is in 'segments', its limits in 'max_tokens' and 'stop'; a replay is greedy and decides "
                "the rest: take them out",
            )
        return extra

    def _prompt(self, line: int, fields: Fields, parts: Any) -> tuple[Segment, ...]:
        if type(parts) is not list:
            raise fields.error("has a 'prelude' that is not a list of lists")
        try:
            found = itemgetter(*parts)(self._by_id)
        except (KeyError, TypeError):  # also for an empty list, which itemgetter does not take
            return tuple([self._part(line, fields, part) for part in parts])
        return found if len(parts) > 1 else (found,)

    def _part(self, line: int, fields: Fields, part: Any) -> Segment:
        if type(part) is dict:
            inline = Fields(self._source, line, part, "a segment")
            inline.refuse_others(_CONTENT_FIELDS)
            return self._segment(inline)
        if type(part) is not str:
            raise fields.error("has a segment that is neither a content id nor an object")
        if part not in self._by_id:
            raise fields.error(f"refers to the segment {brief(part)}, which no line before it defines")
        return self._by_id[part]
