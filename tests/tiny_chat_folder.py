"""A model folder as a user has one, with a tiny model, a byte tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from byte_tokenizers import byte_tokenizer
from tiny_models import tiny_model

STRIPPING = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def tiny_chat_folder(folder: Path, template: str = STRIPPING) -> Path:
    """Its tokens are bytes, save that `th` and `an` are one each."""
    tokenizer = byte_tokenizer(template, merges=2)
    tokenizer.save_pretrained(folder)
    model = tiny_model("llama", 5, vocab_size=len(tokenizer), max_position_embeddings=4096)
    model.save_pretrained(folder)
    return folder
