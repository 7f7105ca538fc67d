"""From a trace to what an engine is given: token ids, tiled by segments (DESIGN 6).

Every segment is tokenised alone, so that its ids, and with them its identity in a cache, are the same wherever it
stands. Ids are kept once per distinct segment; a prompt is put together when it is asked for. A chat's messages are
rendered whole by the model's template; where one is several segments, its shown content is split at their borders.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from kvaudit.engines import Capabilities, Tokenizer
from kvaudit.errors import KvauditError, TraceError, UsageError
from kvaudit.records import (
    GAP_KINDS,
    GLUE,
    LARGEST_TOKEN_ID,
    Prompt,
    PromptSegment,
    Request,
    Segment,
    Trace,
    message_spans,
    messages_of,
)


def tokens_digest(token_ids: Sequence[int]) -> str:
    """16 hexadecimal digits of the SHA-256 of the ids as little-endian 32-bit integers."""
    return sha256(b"".join(token.to_bytes(4, "little") for token in token_ids)).hexdigest()[:16]


def prompt_of(pieces: Iterable[tuple[str, Sequence[int]]]) -> Prompt:
    """A prompt of (kind, token ids) pieces, each a segment of its own."""
    token_ids: list[int] = []
    segments = []
    for kind, piece in pieces:
        start = len(token_ids)
        token_ids += piece
        segments.append(PromptSegment(kind, tokens_digest(piece), start, len(token_ids)))
    return Prompt(tuple(token_ids), tuple(segments))


@dataclass(frozen=True, slots=True)
class _Tokens:
    ids: array[int]
    content_id: str


_Source = str | tuple[int, ...]
"""What a segment's ids come from: its text, or the ids that the trace carries."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment as it stands in a prompt. `segment` is its index in the trace's prompt, None for template glue.

    `text` is what was tokenised, None where the trace carries `ids`; `content_id` hashes the ids.
    """

    segment: int | None
    kind: str
    text: str | None
    ids: array[int]
    content_id: str


class Prompts:
    """The prompts of a trace under one tokenizer.

    `request` and `prelude` raise TraceError, naming request and segment, when a segment that is no separator or
    template glue has no tokens, when an id lies outside the vocabulary, or when the chat template refuses a request.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._leading = tuple(tokenizer.leading_ids)
        self._ids_end = vocabulary_size or LARGEST_TOKEN_ID + 1
        self._tokens: dict[tuple[_Source, bool], _Tokens] = {}

    def request(self, request: Request) -> Prompt:
        return self._prompt(request, request.segments)

    def prelude(self, request: Request) -> Iterator[Prompt]:
        for segments in request.prelude:
            yield self._prompt(request, segments)

    def pieces(self, request: Request, segments: Sequence[Segment]) -> list[Piece]:
        """What a prompt of the request is put together from, in order. Segments without tokens are left out."""
        return [_piece(*parts) for parts in self._pieces(request, segments)]

    def piece(self, request: Request, index: int, segment: Segment, *, leading: bool) -> Piece | None:
        """One segment of a prompt without chat template, at its `index`; None where it has no tokens.

        `leading`: with the ids that the tokenizer puts before every text, as the first segment has them.
        """
        source = _source(segment, segment.text)
        leads = leading and bool(self._leading) and isinstance(source, str)
        tokens = self._cached(request, index, source, leading=leads)
        return None if tokens is None else _piece(index, segment.kind, source, tokens)

    def check(self, trace: Trace, capabilities: Capabilities) -> None:
        """Tokenise the whole trace. Raises UsageError when a prompt and its answer do not fit into the engine."""
        limit = capabilities.max_prompt_tokens
        too_long: list[tuple[str, int, int]] = []
        for request in trace.requests:
            try:
                lengths = self._lengths(request)
            except TraceError as error:
                line = "" if request.line is None else f", line {request.line}"
                raise TraceError(f"{trace.source}{line}: {error.message}", error.hint) from error
            if limit is not None:
                too_long += [(request.request_id, *length) for length in lengths if sum(length) > limit]
        if too_long:
            raise _too_long(too_long, limit)

    def _lengths(self, request: Request) -> list[tuple[int, int]]:
        """Tokens of prompt and of answer, for the request and each prompt of its prelude."""
        if request.max_tokens < 1:
            raise TraceError(
                f"request {request.request_id!r} asks for {request.max_tokens} tokens", "an answer needs at least one"
            )
        prompts = [(request.segments, request.max_tokens), *((segments, 0) for segments in request.prelude)]
        return [
            (sum(len(piece.ids) for *_, piece in self._pieces(request, segments)), answer)
            for segments, answer in prompts
        ]

    def _prompt(self, request: Request, segments: Sequence[Segment]) -> Prompt:
        token_ids: list[int] = []
        tiles = []
        for _, kind, _, piece in self._pieces(request, segments):
            start = len(token_ids)
            token_ids.extend(piece.ids)
            tiles.append(PromptSegment(kind, piece.content_id, start, len(token_ids)))
        return Prompt(tuple(token_ids), tuple(tiles))

    def _pieces(self, request: Request, segments: Sequence[Segment]) -> list[tuple[int | None, str, _Source, _Tokens]]:
        sources = self._rendered(request, segments) if request.chat else _plain(segments)
        leading = bool(self._leading) and not request.chat
        pieces: list[tuple[int | None, str, _Source, _Tokens]] = []
        for index, (segment, kind, source) in enumerate(sources):
            tokens = self._cached(request, index, source, leading=leading and not pieces and isinstance(source, str))
            if tokens is not None:
                pieces.append((segment, kind, source, tokens))
            elif kind not in GAP_KINDS:
                raise TraceError(
                    f"request {request.request_id!r}, segment {index + 1} ({kind}) has no tokens",
                    "take the empty segment out of the trace",
                )
        if not pieces:
            raise TraceError(f"request {request.request_id!r} has a prompt without tokens")
        return pieces

    def _rendered(self, request: Request, segments: Sequence[Segment]) -> Iterator[tuple[int | None, str, _Source]]:
        """What the model's template makes of the messages, each content split over its segments again."""
        messages, spans = messages_of(segments), message_spans(segments)
        try:
            rendered = self._tokenizer.chat(messages)
        except KvauditError:
            raise
        except Exception as error:
            raise TraceError(
                f"request {request.request_id!r} does not fit the model's chat template: {error}"
            ) from error
        shown = [index for index, _ in rendered if index is not None]
        blank = {index for index, (_, content) in enumerate(messages) if not content.strip()}
        if len(shown) != len(set(shown)) or set(shown) | blank != set(range(len(messages))):
            raise TraceError(
                f"request {request.request_id!r}: the model's chat template does not show each message once",
                "take another model, or record the prompts without a chat template",
            )
        for index, text in rendered:
            if index is None or not text:  # a message without content, such as one that only calls a tool
                yield None, GLUE, text
            else:
                start, end = spans[index]
                yield from _shown(request, segments, range(start, end), text)

    def _cached(self, request: Request, index: int, source: _Source, *, leading: bool) -> _Tokens | None:
        """The ids of one segment, or None where it has none."""
        key = (source, leading)
        if key not in self._tokens:
            ids = self._tokenizer.encode(source) if isinstance(source, str) else source
            if not ids:
                return None
            whole = (*self._leading, *ids) if leading else ids
            outside = next((token for token in whole if not 0 <= token < self._ids_end), None)
            if outside is not None:
                raise TraceError(
                    f"request {request.request_id!r}, segment {index + 1}: token id {outside} is not one of the "
                    f"model's (0 to {self._ids_end - 1})",
                    "replay with the model that the trace was recorded for",
                )
            self._tokens[key] = _Tokens(array("i", whole), tokens_digest(whole))
        return self._tokens[key]


def _piece(segment: int | None, kind: str, source: _Source, tokens: _Tokens) -> Piece:
    return Piece(segment, kind, source if isinstance(source, str) else None, tokens.ids, tokens.content_id)


def _plain(segments: Sequence[Segment]) -> Iterator[tuple[int | None, str, _Source]]:
    for index, segment in enumerate(segments):
        yield index, segment.kind, _source(segment, segment.text)


def _shown(
    request: Request, segments: Sequence[Segment], message: range, text: str
) -> Iterator[tuple[int, str, _Source]]:
    """The segments of a message as they stand in its shown text, which may lack white space at the content's ends."""
    if len(message) == 1:
        yield message[0], segments[message[0]].kind, _source(segments[message[0]], text)
        return
    hidden = "".join(segments[index].text for index in message).find(text)
    if hidden < 0:
        raise TraceError(
            f"request {request.request_id!r}: the model's chat template changes the message of segments "
            f"{message[0] + 1} to {message[-1] + 1}",
            "take another model, or record the prompts without a chat template",
        )
    end = -hidden
    for index in message:
        start, end = end, end + len(segments[index].text)
        if visible := text[max(start, 0) : max(end, 0)]:
            yield index, segments[index].kind, _source(segments[index], visible)


def _source(segment: Segment, text: str) -> _Source:
    return text if segment.token_ids is None else segment.token_ids


def _too_long(requests: list[tuple[str, int, int]], limit: int | None) -> UsageError:
    request_id, tokens, answer = requests[0]
    others = f" ({len(requests)} prompts are too long)" if len(requests) > 1 else ""
    return UsageError(
        f"request {request_id!r} has a prompt of {tokens} tokens and asks for {answer}, more than the {limit} that "
        f"the model takes{others}",
        "shorten the trace's window or take a model with a longer context",
    )
