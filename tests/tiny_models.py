"""Tiny seeded models built in code, and a tokenizer to go with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 128
ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


def tiny_config(family: str, rope: str | dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A transformers config: 3 layers, hidden 64, 4 heads, 2 KV heads, 128 tokens, 512 positions, no end token."""
    from transformers import AutoConfig

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": dict(ROTARY[rope or "default"] if isinstance(rope, str | None) else rope),
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }
    return AutoConfig.for_model(family, **settings | FAMILY_SETTINGS[family] | overrides)


def tiny_model(family: str, seed: int = 0, rope: str | dict[str, Any] | None = None, **overrides: Any) -> Any:
    """A transformers model, float32 on the CPU, the same for the same arguments.

    Norms and biases are random too, so that a forward pass that leaves one out is seen. The weights are large
    enough for sharp attention and for answers that depend on the prompt.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, rope, **overrides)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.uniform_(1.2, 2.2)
                elif name.endswith("norm.weight"):
                    parameter.uniform_(0.6, 1.6)
                elif name.endswith(".bias"):
                    parameter.normal_(0.0, 0.3)
    return model.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class TinyTokenizer:
    """One token a character, ASCII only: the id is the character's code."""

    leading_ids: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"tiny-ascii {self.leading_ids}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("ascii")

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[tuple[int | None, str]]:
        pieces: list[tuple[int | None, str]] = []
        for index, (role, content) in enumerate(messages):
            pieces += [(None, f"<{role}>"), (index, content), (None, "\n")]
        return [*pieces, (None, "<assistant>")]
