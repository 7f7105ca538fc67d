from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import PLAIN_TEMPLATE, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from kvaudit.engines import Tokenizer as TokenizerProtocol
from kvaudit.errors import EngineError, TraceError, UsageError
from kvaudit.models.files import ModelFiles, resolve_model
from kvaudit.models.tokenizer import ModelTokenizer, load_tokenizer

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def chat_tokenizer(template: str) -> ModelTokenizer:
    return ModelTokenizer(byte_tokenizer(template))


def test_it_is_a_tokenizer_of_the_engine_contract() -> None:
    tokenizer: TokenizerProtocol = ModelTokenizer(byte_tokenizer())

    assert tokenizer.decode(tokenizer.encode("the end")) == "the end"


@pytest.mark.parametrize(
    ("wrap", "leading"), [(None, ()), ("<s> $A", (0,)), ("<s> $A </s>", (0,)), ("<s> <s> $A", (0, 0)), ("$A </s>", ())]
)
def test_leading_ids_are_what_stands_before_a_text(wrap: str | None, leading: tuple[int, ...]) -> None:
    tokenizer = ModelTokenizer(byte_tokenizer(wrap=wrap))

    assert tokenizer.leading_ids == leading


def test_ids_that_a_file_gives_are_not_guessed() -> None:
    tokenizer = ModelTokenizer(byte_tokenizer(wrap="<s> $A"), (), frozenset([7]))

    assert tokenizer.leading_ids == ()
    assert tokenizer.end_ids == {7}


def test_encode_adds_nothing_and_decode_keeps_everything() -> None:
    tokenizer = ModelTokenizer(byte_tokenizer(wrap="<s> $A </s>"))
    text = "it 's <|turn|>, isn 't it ?</s>"

    ids = tokenizer.encode(text)

    assert ids[0] != 0
    assert ids[-1] == 1
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.offsets(text)[0] == ids
    assert tokenizer.encode("") == []
    assert tokenizer.end_ids == {1}


@UNHURRIED
@given(st.text())
def test_offsets_go_with_the_ids_and_cover_every_character(text: str) -> None:
    ids, offsets = BYTES.offsets(text)

    assert ids == BYTES.encode(text)
    assert len(ids) == len(offsets)
    assert {at for start, end in offsets for at in range(start, end)} == set(range(len(text)))
    assert offsets == sorted(offsets)


@UNHURRIED
@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


BYTES = ModelTokenizer(byte_tokenizer())


def test_the_digest_tells_tokenizers_and_templates_apart() -> None:
    digests = [
        ModelTokenizer(tokenizer).digest
        for tokenizer in (
            byte_tokenizer(),
            byte_tokenizer(PLAIN_TEMPLATE),
            byte_tokenizer(PLAIN_TEMPLATE + " "),
            byte_tokenizer(merges=2),
            byte_tokenizer(wrap="<s> $A"),
        )
    ]

    assert len(set(digests)) == len(digests)
    assert ModelTokenizer(byte_tokenizer()).digest == digests[0]


def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    original = byte_tokenizer(PLAIN_TEMPLATE, wrap="<s> $A")
    original.save_pretrained(tmp_path)
    capfd.readouterr()

    first, second = (load_tokenizer(ModelFiles("tiny", tmp_path)) for _ in range(2))

    assert capfd.readouterr() == ("", "")
    assert first.digest == second.digest
    assert first.leading_ids == (0,)
    assert first.encode("another thing") == ModelTokenizer(original).encode("another thing")
    assert first.chat([("user", "hi")]) == ModelTokenizer(original).chat([("user", "hi")])


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)

    with pytest.raises(UsageError, match="no tokenizer in") as caught:
        load_tokenizer(ModelFiles("tiny", tmp_path))
    assert "\n" not in str(caught.value)


def test_a_damaged_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')

    with pytest.raises(EngineError, match=r"tokenizer of model 'tiny' cannot be loaded") as caught:
        load_tokenizer(ModelFiles("tiny", tmp_path))
    assert "\n" not in str(caught.value)


def test_messages_are_found_where_the_template_put_them() -> None:
    pieces = chat_tokenizer(PLAIN_TEMPLATE).chat([("system", "a"), ("user", "user"), ("assistant", "\n")])

    assert pieces == [
        (None, "<s>You are a user of a tool.<|turn|>system\n"),
        (0, "a"),
        (None, "</s>\n<|turn|>user\n"),
        (1, "user"),
        (None, "</s>\n<|turn|>assistant\n"),
        (2, "\n"),
        (None, "</s>\n<|turn|>assistant\n"),
    ]


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@UNHURRIED
@given(st.lists(st.tuples(ROLES, st.text() | st.text("ua \n</s>")), min_size=1, max_size=4))
@pytest.mark.parametrize("strip", [False, True])
def test_the_pieces_are_the_rendered_text(strip: bool, messages: list[tuple[str, str]]) -> None:
    tokenizer, raw = TEMPLATED[strip]

    pieces = tokenizer.chat(messages)

    rendered = raw.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=False, add_generation_prompt=True
    )
    assert "".join(text for _, text in pieces) == rendered
    kept = [content.strip() if strip else content for _, content in messages]
    assert [(index, text) for index, text in pieces if index is not None] == [
        (index, content) for index, content in enumerate(kept) if content
    ]


def _templated(template: str) -> tuple[ModelTokenizer, Any]:
    raw = byte_tokenizer(template)
    return ModelTokenizer(raw), raw


TEMPLATED = {
    False: _templated(PLAIN_TEMPLATE),
    True: _templated(PLAIN_TEMPLATE.replace("message['content']", "message['content'] | trim")),
}


def test_white_space_that_the_template_takes_off_is_no_content() -> None:
    template = "{% for m in messages %}[{{ m['content'] | trim }}\n]{% endfor %}"

    pieces = chat_tokenizer(template).chat([("user", "one\n"), ("user", "\n two")])

    assert pieces == [(None, "["), (0, "one"), (None, "\n]["), (1, "two"), (None, "\n]")]


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{% for m in messages %}[{{ m['content'] | upper }}]{% endfor %}", "message 0"),
        ("{% for m in messages %}[{{ m['content'] | replace('secret', '') }}]{% endfor %}", "message 1"),
        ("[{{ messages[-1]['content'] }}]", "message 0"),
        (
            "{{ 'a' if 'plain' in messages[0].content else 'b' }}{% for m in messages %}[{{ m.content }}]{% endfor %}",
            "message 0",
        ),
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '!' if 'secret' in messages[1].content }}",
            "message 1",
        ),
        (
            "{% for m in messages %}{{ 'long ' if m['content'] | length > 11 }}[{{ m['content'] }}]{% endfor %}",
            "message",
        ),
    ],
)
def test_a_template_that_changes_a_message_is_refused(template: str, named: str) -> None:
    with pytest.raises(TraceError, match=named):
        chat_tokenizer(template).chat([("user", "plain text"), ("user", "the secret one")])


def test_a_template_that_refuses_the_messages_is_quoted() -> None:
    template = "{{ raise_exception('roles must alternate') }}"

    with pytest.raises(TraceError, match=r"refuses the messages: roles must alternate"):
        chat_tokenizer(template).chat([("user", "hi")])


def test_without_a_template_plain_segments_are_the_way() -> None:
    with pytest.raises(UsageError, match=r"no chat template.*plain segments"):
        ModelTokenizer(byte_tokenizer()).chat([("user", "hi")])


def test_a_template_sees_the_same_day_every_day() -> None:
    template = "{% if strftime_now is defined %}{{ strftime_now(form) }}{% endif %}|{{ messages[0].content }}"

    for form, day in (("%d %b %Y", "26 Jul 2024"), ("%Y-%m-%d", "2024-07-26"), ("%A, %B %d", "Friday, July 26")):
        pieces = chat_tokenizer(template.replace("form)", f"'{form}')")).chat([("user", "hi")])
        assert pieces == [(None, f"{day}|"), (0, "hi")]


@pytest.mark.model
def test_smollm2_has_its_own_tokenizer_and_template() -> None:
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))

    assert tokenizer.leading_ids == ()
    assert tokenizer.end_ids == {2}
    text = "2020-01-02,AAPL,74.06 # # <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    pieces = tokenizer.chat([("user", "user")])
    assert pieces[1:] == [(0, "user"), (None, "<|im_end|>\n<|im_start|>assistant\n")]
