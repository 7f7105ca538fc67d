"""Chat templates that render an earlier turn otherwise once the conversation goes on, or write null as text.

A prompt that a prefix cache has seen is found again only where the next turn's prompt begins with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvaudit.errors import KvauditError
from kvaudit.preflight.common import common_start
from kvaudit.preflight.findings import Findings, Place
from kvaudit.preflight.pieces import PiecedPrompt
from kvaudit.records import Request, message_spans, messages_of

ASSISTANT = "assistant"
_NONE = "None"

Message = tuple[str, str | None]


class Renderer(Protocol):
    """A model's chat template: (role, content) messages as text, with the start of an answer where it is asked for."""

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str: ...


class TemplateLint:
    """Looks at chat requests that go on after an answer: is what was served for that answer how they begin?"""

    def __init__(self, renderer: Renderer, encode: Callable[[str], Sequence[int]], findings: Findings) -> None:
        self._renderer, self._encode, self._findings = renderer, encode, findings

    def add(self, request: Request, prompt: PiecedPrompt) -> None:
        messages: list[Message] = [*messages_of(request.segments)]
        try:
            whole = self._renderer.render(messages)
            self._null_content(request, messages, whole)
            answers = [index for index, (role, _) in enumerate(messages) if role == ASSISTANT and index]
            if answers:
                self._drift(request, prompt, messages, answers[-1], whole)
        except KvauditError:  # a template may refuse what is cut off or empty; the whole prompt it took
            return

    def _drift(
        self, request: Request, prompt: PiecedPrompt, messages: Sequence[Message], answer: int, whole: str
    ) -> None:
        served = self._renderer.render(messages[:answer])
        if whole.startswith(served):
            return
        same = common_start(served, whole)
        turn = len(self._renderer.render(messages[:answer], generation_prompt=False))
        place = _place(request, prompt, same)
        what = (
            f"what the template puts before answer {answer + 1} is not there once the conversation goes on"
            if same >= turn
            else f"the prompt served for message {answer + 1} is not how the conversation begins later"
        )
        group = ("before the answer" if same >= turn else "earlier turn", place.kind)
        self._findings.add("template-drift", group, place, len(self._encode(served[same:])), what)

    def _null_content(self, request: Request, messages: Sequence[Message], whole: str) -> None:
        empty = [index for index, (role, content) in enumerate(messages) if role == ASSISTANT and not content]
        if not empty:
            return
        nulls = [(role, None if index in empty else content) for index, (role, content) in enumerate(messages)]
        added = self._renderer.render(nulls).count(_NONE) - whole.count(_NONE)
        if added > 0:
            first, _ = message_spans(request.segments)[empty[0]]
            place = Place(request.request_id, request.ordinal, first + 1, request.segments[first].kind)
            self._findings.add(
                "null-content",
                place.kind,
                place,
                added * len(self._encode(_NONE)),
                f"message {empty[0] + 1} has no content: where it is sent as null, the prompt says {_NONE!r}",
            )


def _place(request: Request, prompt: PiecedPrompt, character: int) -> Place:
    """The segment that holds a character of the rendered prompt, or the last message before it."""
    end, number, kind = 0, None, None
    for segment, piece in zip(prompt.segments, prompt.pieces, strict=True):
        end += len(piece.text or "")
        if segment is not None:
            number, kind = segment + 1, piece.kind
        if character < end:
            break
    return Place(request.request_id, request.ordinal, number, kind)
