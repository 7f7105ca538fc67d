"""What a GGUF file holds beyond what transformers reads of it."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
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


def gguf_metadata_digest(path: Path) -> str | None:
    """SHA-256 of all that comes before the tensors of a file, in hundredths of a second; None for no GGUF file.

    gguf's own reader takes seconds for the strings of a vocabulary, one by one.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[: len(_MAGIC)] != _MAGIC:
                return None
            return hashlib.sha256(content[: _metadata_end(content)]).hexdigest()
    except (OSError, ValueError, KeyError, OverflowError, struct.error, RecursionError):
        return None


_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type."""
_STRING, _ARRAY = 8, 9
_COUNT, _TYPE = struct.Struct("<Q"), struct.Struct("<I")


def _metadata_end(content: mmap.mmap) -> int:
    position = 8 + 2 * _COUNT.size  # magic, version, number of tensors, number of keys
    for _ in range(_COUNT.unpack_from(content, 8 + _COUNT.size)[0]):
        position += _COUNT.size + _COUNT.unpack_from(content, position)[0]
        kind = _TYPE.unpack_from(content, position)[0]
        position = _value_end(content, kind, position + _TYPE.size)
    return position


def _value_end(content: mmap.mmap, kind: int, position: int) -> int:
    if kind == _STRING:
        return position + _COUNT.size + int(_COUNT.unpack_from(content, position)[0])
    if kind != _ARRAY:
        return position + _SIZES[kind]
    item = _TYPE.unpack_from(content, position)[0]
    count = _COUNT.unpack_from(content, position + _TYPE.size)[0]
    position += _TYPE.size + _COUNT.size
    if item in _SIZES:
        return int(position + count * _SIZES[item])
    for _ in range(count):
        position = _value_end(content, item, position)
    return position


_SAFETENSORS = "use the model's safetensors"


def _is_read(tensor: str, architecture: object) -> bool:
    return bool(TENSORS.fullmatch(tensor) or (architecture == "qwen2" and QKV_BIAS.fullmatch(tensor)))


def _value(file: Any, key: str) -> Any:
    field = file.get_field(key)
    return None if field is None else field.contents()
