"""A model folder as a user has one, with a tiny model, a byte tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

STRIPPING = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
_SPECIAL = ["<s>", "</s>", "<|turn|>"]


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token a byte, save that `th` and `an` are one each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet, "th", "an"])}
    backend = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("a", "n")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|turn|>"],
        chat_template=template,
    )


def tiny_chat_folder(folder: Path, template: str = STRIPPING) -> Path:
    tokenizer = byte_tokenizer(template)
    tokenizer.save_pretrained(folder)
    model = tiny_model("llama", 5, vocab_size=len(tokenizer), max_position_embeddings=4096)
    model.save_pretrained(folder)
    return folder
