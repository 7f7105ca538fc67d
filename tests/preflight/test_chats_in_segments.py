"""Chats whose messages are several segments: what is said of them names the segment, not the message."""

from __future__ import annotations

from collections.abc import Sequence

from inspections import Characters, chat, inspected, rows

from kvaudit.preflight.findings import Finding
from kvaudit.records import Request


def only(requests: Sequence[Request], code: str, tokenizer: Characters | None = None) -> Finding:
    (finding,) = [finding for finding in inspected(requests, tokenizer).findings if finding.code == code]
    return finding


ONE, TWO = "d:first document", "d:second text"
ASKED = [
    chat("r0", "y:Help", "u:Read: ", ONE, "s:\n", TWO, "q: Why?"),
    chat("r1", "y:Help", "u:Read: ", TWO, "s:\n", ONE, "q: How?"),
]


def test_documents_inside_a_message_are_reused_at_any_position() -> None:
    first, second = rows(ASKED)

    assert first.chunk_reused_any == 0
    assert second.chunk_reused_any == sum(len(part.split(":", 1)[1]) for part in ("y:Help", "u:Read: ", ONE, TWO))


def test_a_break_names_the_segment_of_the_message() -> None:
    broken = rows(ASKED)[1].broken

    assert broken is not None
    assert (broken.kind, broken.segment) == ("document", 3)


def test_a_part_of_a_message_that_tokenises_otherwise_in_context_is_found() -> None:
    found = inspected([chat("r0", "u:It", "d:his", "q:?")]).findings
    places = {(one.place.segment, one.place.kind): one.what for one in found if one.code == "context"}

    assert set(places) == {(1, "message"), (2, "document")}
    assert "becomes other tokens at its end" in places[1, "message"]


def test_drift_is_found_behind_a_message_of_several_segments() -> None:
    class Forgetful(Characters):
        def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
            return super().render(messages, generation_prompt) + "<think>" * generation_prompt

        def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
            return [*super().chat(messages), (None, "<think>")]

    grown = [chat("r0", "u:Read ", "d:it"), chat("r1", "u:Read ", "d:it", "a:Done", "d: so", "u:Go ", "d:on")]
    finding = only(grown, "template-drift", Forgetful())

    assert finding.what == "what the template puts before answer 2 is not there once the conversation goes on"
    assert (finding.place.request_id, finding.place.segment) == ("r1", 3)


def test_drift_inside_a_message_names_the_segment_where_it_begins() -> None:
    class Numbering(Characters):
        """Says behind the first message how many there are."""

        def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
            first = (messages[0][0], f"{messages[0][1]}({len(messages)})")
            return super().render([first, *messages[1:]], generation_prompt)

    finding = only([chat("r1", "u:Read ", "d:it", "a:Done", "u:Go on")], "template-drift", Numbering())

    assert (finding.place.segment, finding.place.kind) == (2, "document")


def test_a_null_content_names_its_segment() -> None:
    class Literal(Characters):
        def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
            return super().render([(role, str(content)) for role, content in messages], generation_prompt)

    finding = only([chat("r0", "u:Read ", "d:it", "a:", "u:three lines")], "null-content", Literal())

    assert (finding.place.segment, finding.place.kind) == (3, "message")
    assert finding.what.startswith("message 2 has no content")
