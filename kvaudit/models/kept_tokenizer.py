"""Tokenizers as transformers made them once, in the user's cache: opened again without transformers and torch.

A GGUF file's vocabulary takes transformers and gguf many seconds, importing them some more. What is kept is the very
serialisation that a tokenizer's digest covers, under a key of all that it was made from. It is kept only where it
encodes and decodes like the original, and read only where it is whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import orjson
from tokenizers import Tokenizer

from kvaudit.models.fetch import cache_folder, file_sha256
from kvaudit.models.files import ModelFiles
from kvaudit.models.gguf_file import gguf_metadata_digest

VERSION = "2"
"""Of what is kept and how."""

MADE_WITH = ("transformers", "tokenizers", "gguf")
MADE_FROM = (".json", ".jinja", ".model", ".txt")
PROBES = (
    "The cat sat. 12,345.67 \u2013 caf\u00e9 \u0130\u00df \ufb01 e\u0301\n\n\tdef f(x):\r\n    return x  \n",
    " \u4f60\u597d \u3053\u3093 \uc548\ub155 \u0645\u0631\u062d \U0001f44d\U0001f3fd \u200b\u2028\u0000\u00a0",
    "<s></s><|im_start|>user\n<|endoftext|> <unk> [INST] <0x0A> \u2581",
    "",
)


class KeptTokenizer:
    """What `ModelTokenizer` uses of a transformers tokenizer; transformers is imported for chats only."""

    def __init__(self, kept: dict[str, Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_str(kept["backend"])
        self.chat_template = kept["chat_template"]
        self._default_template = kept["default_template"]
        self.eos_token_id = kept["eos_token_id"]
        self.leading_ids = tuple(kept["leading_ids"])
        self.end_ids = frozenset(kept["end_ids"])
        self.digest: str = kept["digest"]
        self.context_tokens: int | None = kept["context_tokens"]
        self._special_tokens = kept["special_tokens"]
        self._transformers: Any = None

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def get_chat_template(self) -> str | None:
        template: str | None = self._default_template
        return template

    @property
    def special_tokens_map(self) -> Mapping[str, Any]:
        tokens: Mapping[str, Any] = self._as_transformers().special_tokens_map
        return tokens

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return self._as_transformers().apply_chat_template(messages, **options)

    def _as_transformers(self) -> Any:
        if self._transformers is None:
            from transformers import PreTrainedTokenizerFast

            backend = Tokenizer.from_str(self.backend_tokenizer.to_str())
            self._transformers = PreTrainedTokenizerFast(
                tokenizer_object=backend, chat_template=self.chat_template, **self._special_tokens
            )
        return self._transformers


def tokenizer_key(files: ModelFiles) -> str | None:
    """SHA-256 over all that a tokenizer is made from: file contents and libraries. None where that cannot be told."""
    try:
        parts = [VERSION, *(f"{name} {version(name)}" for name in MADE_WITH)]
        if files.gguf_file is None:
            parts += [f"{path.relative_to(files.folder)} {file_sha256(path)}" for path in _made_from(files.folder)]
        else:
            metadata = gguf_metadata_digest(files.folder / files.gguf_file)
            if metadata is None:
                return None
            parts.append(metadata)
    except (OSError, PackageNotFoundError):
        return None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _made_from(folder: Path) -> Iterator[Path]:
    inside = (*folder.iterdir(), *(folder / "additional_chat_templates").glob("*"))
    return (path for path in sorted(inside) if path.suffix in MADE_FROM and path.is_file())


def kept_tokenizer(key: str) -> KeptTokenizer | None:
    """The tokenizer under a key; None where there is none or it is damaged."""
    try:
        checksum, _, content = _place(key).read_bytes().partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            return None
        return KeptTokenizer(orjson.loads(content))
    except OSError:
        return None


def keep_tokenizer(
    key: str,
    tokenizer: Any,
    digest: str,
    leading_ids: Sequence[int],
    end_ids: frozenset[int],
    context_tokens: int | None,
) -> None:
    """Keep a transformers tokenizer, if it does the same afterwards and can be written."""
    content = {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "chat_template": tokenizer.chat_template,
        "default_template": tokenizer.get_chat_template() if tokenizer.chat_template else None,
        "eos_token_id": tokenizer.eos_token_id,
        "leading_ids": list(leading_ids),
        "end_ids": sorted(end_ids),
        "digest": digest,
        "context_tokens": context_tokens,
        "special_tokens": _special_tokens(tokenizer),
    }
    if _behaviour(KeptTokenizer(content)) == _behaviour(tokenizer):
        with suppress(OSError):
            _write(_place(key), orjson.dumps(content))


def _special_tokens(tokenizer: Any) -> dict[str, str | list[str]]:
    """What a chat template sees of them."""
    return {
        name: list(map(str, token)) if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


def _behaviour(tokenizer: Any) -> list[object]:
    found: list[object] = [_special_tokens(tokenizer)]
    added = (token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values())
    for text in (*PROBES, "a".join(added)):
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        found += [ids, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)]
    return found


def _place(key: str) -> Path:
    return cache_folder() / "tokenizers" / f"{key}.json"


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also where several processes write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
