"""Rotary position embedding: which variants are computed, and their frequencies as transformers gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvaudit.errors import UsageError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_type_of(config: Any) -> str:
    """The rotary variant of a transformers config. Raises UsageError, naming it, for one that is not computed."""
    parameters = config.rope_parameters or {}
    rope_type = str(parameters.get("rope_type", "default"))
    if rope_type not in ROPE_TYPES:
        raise UsageError(f"rotary type {rope_type!r} is not supported", f"supported: {', '.join(ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise UsageError(
            f"a partial rotary factor of {partial} is not supported", "supported: models that rotate every dimension"
        )
    return rope_type


def rotary_frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2] on the CPU, and the factor on cos and sin (1.0 except for YaRN).

    Position p rotates the pair (i, i + head_dim / 2) by p * frequency[i]; cos and sin are then multiplied by the
    factor (YaRN's attention factor, arXiv 2309.00071, section 3.4).
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = rope_type_of(config)
    if rope_type != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](config)
        return frequencies.to(torch.float32), float(factor)
    # transformers keeps this variant in each family's own module, not in the table.
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
