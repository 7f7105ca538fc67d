"""A model's tokenizer and limits without its weights: for looking at a trace, where nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from kvaudit.engines.embedded.gguf_file import gguf_context_tokens, parsed_once
from kvaudit.engines.embedded.models import ModelFiles, resolve_model
from kvaudit.engines.embedded.tokenizer import ModelTokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ReadingModel:
    """`context_tokens`: the longest prompt and answer together, None where the model's files do not say."""

    name: str
    tokenizer: ModelTokenizer
    context_tokens: int | None


def open_tokenizer(model: str) -> ReadingModel:
    """Raises UsageError for an unknown model or one without a tokenizer, EngineError for a failed fetch or damage."""
    files = resolve_model(model)
    with parsed_once():
        return ReadingModel(model, load_tokenizer(files), _context_tokens(files))


def _context_tokens(files: ModelFiles) -> int | None:
    if files.gguf_file is not None:
        return gguf_context_tokens(files.folder / files.gguf_file)
    config = orjson.loads((files.folder / "config.json").read_bytes())
    tokens = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return tokens if isinstance(tokens, int) else None
