"""What a GGUF file holds beyond what transformers reads of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from kvaudit.errors import UsageError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""GGUF keeps Mistral's models as llama."""
TENSORS = re.compile(
    r"(token_embd|output|output_norm)\.weight"
    r"|blk\.\d+\.((attn|ffn|attn_q|attn_k)_norm|attn_(q|k|v|output)|ffn_(gate|up|down))\.weight"
)
QKV_BIAS = re.compile(r"blk\.\d+\.attn_(q|k|v)\.bias")
END_KEYS = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))


@contextmanager
def parsed_once() -> Iterator[None]:
    """Within it, a GGUF file is parsed once, however many parts of transformers open it.

    transformers parses it for the config, the tokenizer and the weights, and builds gguf's table of tensor names
    again for every module of the model: together three quarters of a small model's loading time.
    """
    import gguf

    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    parsed = cache(reader)
    gguf.GGUFReader = lambda path, *arguments: parsed(os.fspath(path), *arguments)
    gguf.get_tensor_name_map = cache(names)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def check_gguf(path: Path) -> None:
    """Raise UsageError, naming it, for what transformers passes over in a GGUF file although it changes the model:
    rotary scaling, an active sliding window, tensors that no layer reads.
    """
    import gguf

    file = gguf.GGUFReader(path)
    architecture = _value(file, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"{path.name}: model type {architecture!r} in a GGUF file is not supported",
            f"supported: {', '.join(ARCHITECTURES)}",
        )
    scaling = _value(file, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise UsageError(f"{path.name}: rotary scaling {scaling!r} in a GGUF file is not supported", _SAFETENSORS)
    window = _value(file, f"{architecture}.attention.sliding_window")
    if window and window < _value(file, f"{architecture}.context_length"):
        raise UsageError(f"{path.name}: sliding-window attention ({window} positions) is not supported")
    unread = [tensor.name for tensor in file.tensors if not _is_read(tensor.name, architecture)]
    if unread:
        raise UsageError(f"{path.name}: tensor {unread[0]!r} in a GGUF file is not supported", _SAFETENSORS)


def gguf_end_ids(path: Path) -> frozenset[int]:
    """What the file says ends an answer; releases of transformers fall back to other ids in its place."""
    import gguf

    file = gguf.GGUFReader(path)
    ends = (_value(file, key) for key in END_KEYS)
    return frozenset(int(end) for end in ends if end is not None)


def gguf_leading_ids(path: Path) -> tuple[int, ...] | None:
    """What the file says stands before every text, None where it says nothing; transformers 5.0 puts BOS there."""
    import gguf

    file = gguf.GGUFReader(path)
    adds = _value(file, "tokenizer.ggml.add_bos_token")
    if adds is None:
        return None
    begin = _value(file, "tokenizer.ggml.bos_token_id")
    return (int(begin),) if adds and begin is not None else ()


def gguf_context_tokens(path: Path) -> int | None:
    """The longest context that the file says the model takes; None where it says nothing."""
    import gguf

    file = gguf.GGUFReader(path)
    tokens = _value(file, f"{_value(file, 'general.architecture')}.context_length")
    return None if tokens is None else int(tokens)


_SAFETENSORS = "use the model's safetensors"


def _is_read(tensor: str, architecture: object) -> bool:
    return bool(TENSORS.fullmatch(tensor) or (architecture == "qwen2" and QKV_BIAS.fullmatch(tensor)))


def _value(file: Any, key: str) -> Any:
    field = file.get_field(key)
    return None if field is None else field.contents()
