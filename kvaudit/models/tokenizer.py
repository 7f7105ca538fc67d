"""A model's own tokenizer and chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import orjson

from kvaudit.errors import TraceError, UsageError
from kvaudit.models.files import ModelFiles
from kvaudit.models.gguf_file import gguf_end_ids, gguf_leading_ids, parsed_once
from kvaudit.models.quiet import first_line, quietly

Piece = tuple[int | None, str]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

TEMPLATE_DAY = datetime(2024, 7, 26)
"""What a chat template sees as today (Llama's own default), so that a prompt is the same on every day."""

_NULLS_KEPT = "{% set messages = given_messages %}"
"""Before a template: some releases of transformers take null contents out of `messages`, other servers do not."""


class ModelTokenizer:
    """The `Tokenizer` of an engine over a transformers tokenizer."""

    def __init__(
        self, tokenizer: Any, leading_ids: tuple[int, ...] | None = None, end_ids: frozenset[int] | None = None
    ) -> None:
        """`leading_ids` and `end_ids` where a file gives them; otherwise the tokenizer's own.

        Turns truncation and padding off in `tokenizer`, as some files ask for them: a prompt is never cut or filled.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(f"tokenizer {type(tokenizer).__name__} is not supported", "a tokenizer.json is needed")
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._template = _same_every_day(tokenizer.get_chat_template()) if tokenizer.chat_template else None
        template = orjson.dumps(tokenizer.chat_template, option=orjson.OPT_SORT_KEYS)
        self._digest = hashlib.sha256(backend.to_str().encode() + b"\0" + template).hexdigest()
        self._leading_ids = self._put_before("a") if leading_ids is None else leading_ids
        own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self._end_ids = frozenset(own_end) if end_ids is None else end_ids

    @property
    def digest(self) -> str:
        """SHA-256 over the serialised tokenizer and its chat template."""
        return self._digest

    @property
    def leading_ids(self) -> tuple[int, ...]:
        return self._leading_ids

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end an answer, as the tokenizer has them."""
        return self._end_ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of `encode`, and for each the half-open range of characters that it stands for.

        Tokens that share a character have it in each of their ranges; a space may lie between two ranges.
        """
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"], encoded["offset_mapping"]

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[Piece]:
        """(index of the message or None for template glue, text) for (role, content) messages.

        The texts, concatenated, are what the model's template renders with a generation prompt; pieces without
        text are left out. Raises UsageError without a template, TraceError, naming the message, where the template
        refuses the messages or changes a content by more than the white space around it.
        """
        rendered = self.render(messages)
        marks = [f"kvaudit-message-{index}-content" for index in range(len(messages))]
        marked = self.render([(role, mark) for (role, _), mark in zip(messages, marks, strict=True)])
        return _pieces(rendered, _glue(marked, marks), [content for _, content in messages])

    def render(self, messages: Sequence[tuple[str, str | None]], generation_prompt: bool = True) -> str:
        """What the model's template itself makes of (role, content) messages; None is a content that is null.

        Raises UsageError without a template, TraceError where the template refuses the messages.
        """
        if self._template is None:
            raise UsageError("the model has no chat template", "use a trace of plain segments instead of messages")
        from jinja2 import TemplateError

        given = [{"role": role, "content": content} for role, content in messages]
        nulls = any(content is None for _, content in messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                given,
                tokenize=False,
                chat_template=_NULLS_KEPT + self._template if nulls else self._template,
                add_generation_prompt=generation_prompt,
                given_messages=given,
            )
        except ImportError as error:
            raise UsageError(f"chat templates cannot be rendered: {first_line(error)}") from error
        except (TemplateError, ValueError, TypeError, LookupError) as error:
            raise TraceError(f"the model's chat template refuses the messages: {first_line(error)}") from error
        return text

    def _put_before(self, text: str) -> tuple[int, ...]:
        plain = self.encode(text)
        full: list[int] = self._tokenizer.encode(text, add_special_tokens=True, verbose=False)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        raise UsageError("the tokenizer changes a text when it adds special tokens", "this is not supported")


def load_tokenizer(files: ModelFiles) -> ModelTokenizer:
    """The tokenizer beside a model's weights, or the one in its GGUF file.

    Raises UsageError where there is none, EngineError for a damaged one.
    """
    return load_with_original(files)[0]


def load_with_original(files: ModelFiles) -> tuple[ModelTokenizer, Any]:
    """As `load_tokenizer`, with the transformers tokenizer under it."""
    if files.gguf_file is None and not any((files.folder / name).is_file() for name in TOKENIZER_FILES):
        raise UsageError(f"model {files.name!r}: no tokenizer in {files.folder}", "needs a tokenizer.json")
    with quietly(f"tokenizer of model {files.name!r}"), parsed_once():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            files.folder, gguf_file=files.gguf_file, local_files_only=True, trust_remote_code=False
        )
        if files.gguf_file is None:
            return ModelTokenizer(tokenizer), tokenizer
        path = files.folder / files.gguf_file
        return ModelTokenizer(tokenizer, gguf_leading_ids(path), gguf_end_ids(path)), tokenizer


def _same_every_day(template: str) -> str:
    """The template under a macro of the name by which it would ask for the time."""
    if "strftime_now" not in template:
        return template
    fills = "".join(f" | replace('%{code}', '{TEMPLATE_DAY.strftime(f'%{code}')}')" for code in "YymdBbAajHMS")
    return f"{{% macro strftime_now(format) %}}{{{{ format{fills} }}}}{{% endmacro %}}{template}"


def _glue(marked: str, marks: Sequence[str]) -> list[str]:
    """What the template puts before each message and after the last."""
    glue = []
    for index, mark in enumerate(marks):
        before, found, marked = marked.partition(mark)
        if not found:
            raise _changed(index)
        glue.append(before)
    return [*glue, marked]


def _pieces(rendered: str, glue: Sequence[str], contents: Sequence[str]) -> list[Piece]:
    pieces: list[Piece] = [(None, glue[0])]
    if not rendered.startswith(glue[0]):
        raise _changed(0)
    position = len(glue[0])
    for index, content in enumerate(contents):
        after = glue[index + 1]
        for kept in (content, content.rstrip(), content.lstrip(), content.strip()):
            if rendered.startswith(kept + after, position):
                break
        else:
            raise _changed(index)
        pieces += [(index, kept), (None, after)]
        position += len(kept) + len(after)
    if position != len(rendered):
        raise _changed(len(contents) - 1)
    return [(index, text) for index, text in pieces if text]


def _changed(index: int) -> TraceError:
    return TraceError(
        f"message {index} is changed by the model's chat template",
        "what stands in the prompt is not what the trace holds; use a trace of plain segments",
    )
