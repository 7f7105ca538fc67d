"""Tokenizers that are kept in the user's cache: the same as those that transformers makes, or not kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from byte_tokenizers import PLAIN_TEMPLATE, byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvaudit.models import reading
from kvaudit.models.files import ModelFiles, resolve_model
from kvaudit.models.kept_tokenizer import PROBES, kept_tokenizer, tokenizer_key
from kvaudit.models.reading import ReadingModel, open_tokenizer
from kvaudit.models.tokenizer import ModelTokenizer, load_tokenizer
from kvaudit.traces import read_trace

FIXTURES = sorted((Path(__file__).parents[2] / "fixtures").glob("*.jsonl.gz"))
MESSAGES = [("system", "Help."), ("user", "the hand\n"), ("assistant", "an <s> end"), ("user", "?")]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("KVAUDIT_CACHE", str(folder))
    return folder


def model(folder: Path, tokenizer: Any = None) -> str:
    (tokenizer or byte_tokenizer(PLAIN_TEMPLATE, wrap="<s> $A")).save_pretrained(folder)
    (folder / "config.json").write_bytes(orjson.dumps({"model_type": "llama", "max_position_embeddings": 77}))
    (folder / "model.safetensors").write_bytes(b"not weights")
    return str(folder)


def again(name: str, monkeypatch: pytest.MonkeyPatch) -> ReadingModel:
    """The model, where nothing may convert it."""
    with monkeypatch.context() as patched:
        patched.delattr(reading, "load_with_original")
        return open_tokenizer(name)


def files_in(cache: Path) -> list[Path]:
    return sorted((cache / "tokenizers").glob("*"))


def test_the_second_time_it_is_not_converted_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = model(tmp_path)
    first, second = open_tokenizer(name), again(name, monkeypatch)
    one, other = first.tokenizer, second.tokenizer

    assert other.digest == one.digest == load_tokenizer(resolve_model(name)).digest
    assert (other.leading_ids, other.end_ids) == (one.leading_ids, one.end_ids) == ((0,), {1})
    assert second.context_tokens == first.context_tokens == 77
    for text in (*PROBES, *(content for _, content in MESSAGES)):
        assert other.encode(text) == one.encode(text)
        assert other.offsets(text) == one.offsets(text)
        assert other.decode(other.encode(text)) == one.decode(one.encode(text)) == text
    assert other.chat(MESSAGES) == one.chat(MESSAGES)
    assert other.render([("user", None)], generation_prompt=False) == one.render([("user", None)], False)


def test_special_tokens_of_the_model_alone_are_looked_at_before_it_is_kept(tmp_path: Path, cache: Path) -> None:
    """transformers splits them where it is told to, and its setting is no part of what is kept."""
    alphabet = ["<|first|>", "<|last|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    splitting = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|first|>", eos_token="<|last|>", split_special_tokens=True
    )
    name, text = model(tmp_path, splitting), "<|last|>hi"

    first = open_tokenizer(name).tokenizer.encode(text)
    assert len(first) == len(text)
    assert open_tokenizer(name).tokenizer.encode(text) == first
    assert not files_in(cache)


def test_one_that_would_cut_and_fill_texts_is_kept_and_does_neither(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cutting = tmp_path / "whole", tmp_path / "cutting"
    plain, name, text = open_tokenizer(model(whole)).tokenizer, model(cutting), "the hand " * 40
    asked = orjson.loads((cutting / "tokenizer.json").read_bytes())
    asked["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    asked["padding"] = {"strategy": {"Fixed": 900}, "direction": "Right", "pad_to_multiple_of": None}
    asked["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    (cutting / "tokenizer.json").write_bytes(orjson.dumps(asked))

    first, kept = open_tokenizer(name).tokenizer, again(name, monkeypatch).tokenizer

    assert len(files_in(cache)) == 2
    for tokenizer in (first, kept):
        assert tokenizer.digest == plain.digest
        assert tokenizer.encode(text) == plain.encode(text)
        assert tokenizer.offsets(text) == plain.offsets(text)
        assert tokenizer.leading_ids == plain.leading_ids
        assert tokenizer.chat([("user", text)]) == plain.chat([("user", text)])
        assert tokenizer.encode(text) == plain.encode(text)


def test_another_chat_template_beside_the_first_is_another_tokenizer(tmp_path: Path) -> None:
    name = model(tmp_path)
    before = tokenizer_key(resolve_model(name))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    assert tokenizer_key(resolve_model(name)) != before


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text() | st.sampled_from(["<s>", "</s>", "<|turn|>", " the", " an", "\n"]), max_size=8))
def test_random_texts_have_the_same_ids(tmp_path: Path, parts: list[str]) -> None:
    name, text = str(tmp_path), "".join(parts)
    if not (tmp_path / "config.json").exists():
        open_tokenizer(model(tmp_path))
    key = tokenizer_key(resolve_model(name))
    kept = kept_tokenizer(key or "")

    assert kept is not None
    assert kept.encode(text, add_special_tokens=False) == ORIGINAL.encode(text)
    assert kept.encode(text) == [0, *ORIGINAL.encode(text)]


ORIGINAL = ModelTokenizer(byte_tokenizer(PLAIN_TEMPLATE, wrap="<s> $A"))


def test_templates_see_the_special_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}"
    name = model(tmp_path, byte_tokenizer(template))
    open_tokenizer(name)

    assert again(name, monkeypatch).tokenizer.render([("user", "hi")]) == "<s>|</s>|hi"


def test_without_a_template_there_is_none_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = model(tmp_path, byte_tokenizer())
    first = open_tokenizer(name)

    assert again(name, monkeypatch).tokenizer.digest == first.tokenizer.digest


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_any_file_that_it_is_made_from_makes_another(tmp_path: Path, file: str) -> None:
    files = resolve_model(model(tmp_path))
    before = tokenizer_key(files)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes() + b"\n")

    assert before is not None
    assert tokenizer_key(files) != before


def test_other_libraries_make_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvaudit.models import kept_tokenizer as module

    files = resolve_model(model(tmp_path))
    before = tokenizer_key(files)
    monkeypatch.setattr(module, "version", lambda name: "0.0")

    assert tokenizer_key(files) != before


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:999] + b"x" + raw[1000:], lambda raw: b""])
def test_what_is_damaged_is_made_anew(
    tmp_path: Path, cache: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = model(tmp_path)
    first = open_tokenizer(name)
    (file,) = files_in(cache)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))

    assert open_tokenizer(name).tokenizer.digest == first.tokenizer.digest
    assert file.read_bytes() == whole
    assert again(name, monkeypatch).tokenizer.encode("the") == first.tokenizer.encode("the")


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / "file"))
    (tmp_path / "model").mkdir()

    assert open_tokenizer(model(tmp_path / "model")).tokenizer.encode("the")


def test_a_tokenizer_that_would_do_otherwise_is_not_kept(tmp_path: Path, cache: Path) -> None:
    tokenizer = byte_tokenizer(PLAIN_TEMPLATE)
    tokenizer.split_special_tokens = True
    tokenizer.init_kwargs["split_special_tokens"] = True
    opened = open_tokenizer(model(tmp_path, tokenizer))

    assert opened.tokenizer.encode("<s>") != [0]
    assert files_in(cache) == []


def test_a_key_needs_a_file_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF")

    assert tokenizer_key(ModelFiles("no", tmp_path, "no.gguf")) is None
    assert tokenizer_key(ModelFiles("gone", tmp_path / "gone")) is None


def test_neither_torch_nor_transformers_is_imported_for_plain_texts(tmp_path: Path, cache: Path) -> None:
    name = model(tmp_path)
    open_tokenizer(name)
    program = (
        "import sys; from kvaudit.models.reading import open_tokenizer\n"
        "open_tokenizer(sys.argv[1]).tokenizer.encode('the')\n"
        "print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program, name], check=True, capture_output=True, text=True)

    assert ran.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelTokenizer, ModelTokenizer]:
    """The default model's tokenizer as transformers makes it, and as it is kept."""
    files = resolve_model("smollm2-135m")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KVAUDIT_CACHE", str(tmp_path_factory.mktemp("kept")))
        patched.setattr(reading, "resolve_model", lambda name: files)
        first = open_tokenizer("smollm2-135m")
        return first.tokenizer, again("smollm2-135m", patched).tokenizer


@pytest.mark.model
def test_the_default_model_is_the_same_when_kept(default_model: tuple[ModelTokenizer, ModelTokenizer]) -> None:
    original, kept = default_model
    texts = {segment.text for path in FIXTURES for request in read_trace(path).requests for segment in request.segments}

    assert len(texts) > 30
    assert kept.digest == original.digest
    assert (kept.leading_ids, kept.end_ids) == (original.leading_ids, original.end_ids)
    for text in texts:
        assert kept.encode(text) == original.encode(text)
    assert kept.chat(MESSAGES) == original.chat(MESSAGES)


@pytest.mark.model
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60) | st.text("\u0130\u0301\ufb01 \n\t'<|im_end|>aZ9\U0001f44d\u4f60", max_size=60))
def test_the_default_model_has_the_same_ids_for_any_text(
    default_model: tuple[ModelTokenizer, ModelTokenizer], text: str
) -> None:
    original, kept = default_model

    assert kept.encode(text) == original.encode(text)
    assert kept.offsets(text) == original.offsets(text)
