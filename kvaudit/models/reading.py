"""A model's tokenizer and limits without its weights: for looking at a trace, where nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from kvaudit.models.files import ModelFiles, resolve_model
from kvaudit.models.gguf_file import gguf_context_tokens, parsed_once
from kvaudit.models.kept_tokenizer import keep_tokenizer, kept_tokenizer, tokenizer_key
from kvaudit.models.tokenizer import ModelTokenizer, load_with_original


@dataclass(frozen=True, slots=True)
class ReadingModel:
    """`context_tokens`: the longest prompt and answer together, None where the model's files do not say."""

    name: str
    tokenizer: ModelTokenizer
    context_tokens: int | None


def open_tokenizer(model: str) -> ReadingModel:
    """Open a model's tokenizer: slowly the first time, then from the user's cache.

    Raises UsageError for an unknown model or one without a tokenizer, EngineError for a failed fetch or damage.
    """
    files = resolve_model(model)
    key = tokenizer_key(files)
    if key is not None and (opened := _kept(model, key)) is not None:
        return opened
    with parsed_once():
        tokenizer, original = load_with_original(files)
        opened = ReadingModel(model, tokenizer, _context_tokens(files))
    if key is not None:
        facts = (tokenizer.digest, tokenizer.leading_ids, tokenizer.end_ids, opened.context_tokens)
        keep_tokenizer(key, original, *facts)
    return opened


def _kept(model: str, key: str) -> ReadingModel | None:
    kept = kept_tokenizer(key)
    if kept is None:
        return None
    tokenizer = ModelTokenizer(kept, kept.leading_ids, kept.end_ids)
    return ReadingModel(model, tokenizer, kept.context_tokens) if tokenizer.digest == kept.digest else None


def _context_tokens(files: ModelFiles) -> int | None:
    if files.gguf_file is not None:
        return gguf_context_tokens(files.folder / files.gguf_file)
    config = orjson.loads((files.folder / "config.json").read_bytes())
    tokens = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return tokens if isinstance(tokens, int) else None
