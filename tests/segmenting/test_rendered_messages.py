"""A message that is cut is rendered by the model's own template as if it were whole, and split again."""

from __future__ import annotations

import pytest
from byte_tokenizers import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_chat_folder import STRIPPING

from kvaudit.models.tokenizer import ModelTokenizer
from kvaudit.prompts import Prompts
from kvaudit.records import Request, Segment, messages_of
from kvaudit.traces.segments import make_segment

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEEPING = STRIPPING.replace(" | trim", "")
TOKENIZERS = {template: ModelTokenizer(byte_tokenizer(template, merges=2)) for template in (STRIPPING, KEEPING)}
TEXT = st.text(st.sampled_from("ab \nthé😀"), max_size=8)


@st.composite
def chats(draw: st.DrawFn) -> tuple[Segment, ...]:
    segments = []
    for role in draw(st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=4)):
        segments.append(make_segment("message", draw(TEXT), role))
        segments += [make_segment("document", text) for text in draw(st.lists(TEXT.filter(bool), max_size=3))]
    return tuple(segments)


@UNHURRIED
@given(chats(), st.sampled_from([STRIPPING, KEEPING]))
def test_the_pieces_are_what_the_template_renders(segments: tuple[Segment, ...], template: str) -> None:
    tokenizer = TOKENIZERS[template]
    pieces = Prompts(tokenizer).pieces(Request("r0", 0, segments, chat=True), segments)

    assert "".join(piece.text or "" for piece in pieces) == tokenizer.render(messages_of(segments))
    shown = [piece for piece in pieces if piece.segment is not None]
    assert [piece.segment for piece in shown] == sorted({piece.segment for piece in shown})
    for piece in shown:
        assert piece.segment is not None
        assert piece.kind == segments[piece.segment].kind
        assert (piece.text or "") in segments[piece.segment].text
    hidden = {*range(len(segments))} - {piece.segment for piece in shown}
    assert all(not segments[index].text.strip() for index in hidden)


@pytest.mark.parametrize("template", [STRIPPING, KEEPING])
def test_a_message_in_one_segment_is_what_it_always_was(template: str) -> None:
    segments = tuple(make_segment("message", text, "user") for text in (" a ", "b\n", ""))
    pieces = Prompts(TOKENIZERS[template]).pieces(Request("r0", 0, segments, chat=True), segments)

    expected = [" a ", "b\n"] if template == KEEPING else ["a", "b"]
    assert [piece.text for piece in pieces if piece.segment is not None] == expected
