"""A model's tokenizer and limits, opened without its weights."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvaudit.engines.embedded import weights
from kvaudit.errors import EngineError
from kvaudit.models.reading import open_tokenizer
from kvaudit.preflight.inspection import Reading, inspect

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose weights are no weights: nothing may read them."""
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(orjson.dumps({"model_type": "llama", "max_position_embeddings": 77}))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    return tmp_path


def test_the_weights_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(weights, "load_weights")
    opened = open_tokenizer(str(folder))

    assert opened.context_tokens == 77
    assert opened.tokenizer.encode("a b c") == [0, 1, 2]


def test_a_config_without_a_length_has_no_limit(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "llama"}')

    assert open_tokenizer(str(folder)).context_tokens is None


def test_a_damaged_config_is_one_error(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"{broken")

    with pytest.raises(EngineError, match=r"config\.json"):
        open_tokenizer(str(folder))


def test_the_template_is_rendered_with_and_without_the_start_of_an_answer(folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder)).tokenizer
    messages = [("user", "a"), ("assistant", None)]

    assert tokenizer.render(messages) == "<user>a\n<assistant>None\n<assistant>"
    assert tokenizer.render(messages[:1], generation_prompt=False) == "<user>a\n"


@pytest.mark.model
def test_the_default_model_reads_a_conversation_without_drift() -> None:
    from inspections import chat

    opened = open_tokenizer("smollm2-135m")
    turns = [chat("r0", "u:Hello"), chat("r1", "u:Hello", "a:Hi there.", "u:Go on"), chat("r2", "u:Hello", "a:", "u:?")]
    found = inspect(turns, Reading(opened.tokenizer, opened.tokenizer, opened.context_tokens))

    assert opened.context_tokens == 8192
    assert not [finding for finding in found.findings if finding.code == "template-drift"]
    assert found.totals.sglang_reused > 20
