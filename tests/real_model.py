"""The real model as transformers itself loads it."""

from __future__ import annotations

from typing import Any

import torch

from kvaudit.models.files import ModelFiles
from kvaudit.models.gguf_file import parsed_once


def transformers_model(files: ModelFiles) -> Any:
    """Float32 on the CPU, with transformers' SDPA attention."""
    from transformers import AutoModelForCausalLM

    with parsed_once():
        return AutoModelForCausalLM.from_pretrained(
            files.folder, gguf_file=files.gguf_file, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
