"""Responses requests that go on from earlier ones: the conversation that the server kept, put before each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.traces.apis import is_embedding
from kvaudit.traces.bodies import responses_input, responses_items
from kvaudit.traces.foreign import Call
from kvaudit.traces.shapes import as_object
from kvaudit.traces.tally import LeftOut


@dataclass(frozen=True, slots=True)
class _Turn:
    messages: list[Any]
    session: str


@dataclass(slots=True)
class Chains:
    """Conversations up to each response of the file, by its id."""

    turns: dict[str, _Turn] = field(default_factory=dict)

    def continued(self, call: Call) -> Call | LeftOut:
        """A call with the conversation before it, in its session: where none is named, the response that began it.

        Raises TraceError, without its place, for a call that goes on from what the file does not hold.
        """
        if is_embedding(call.body):
            return LeftOut(call.place, "is an embedding request")
        for name, what in (("conversation", "conversation"), ("prompt", "prompt")):
            if call.body.get(name):
                raise TraceError(f"has a {what} that the server keeps, and the file does not")
        turn = self._turn(call.body.get("previous_response_id"))
        before, session = (turn.messages, turn.session) if turn else ([], None)
        began = self._remember(call, before, session)
        return replace(call, session=call.session or session or began, before=before)

    def _turn(self, previous: Any) -> _Turn | None:
        if previous is None:
            return None
        if type(previous) is not str or previous not in self.turns:
            raise TraceError("goes on from a response that the file does not hold before it")
        return self.turns[previous]

    def _remember(self, call: Call, before: list[Any], session: str | None) -> str | None:
        """The id of the response that others may go on from."""
        response = as_object(call.response)
        name, output = response.get("id"), response.get("output")
        if type(name) is not str or not name or type(output) is not list:
            return None
        self.turns[name] = _Turn([*before, *responses_input(call.body), *responses_items(output)], session or name)
        return name
