"""A model as a Hugging Face folder, which is what vLLM loads. A GGUF file becomes one, once, in the user's cache.

vLLM of itself reads no GGUF file on every device, and LMCache looks for the tokenizer of a folder. What is written are
the very numbers that the embedded engine computes with: the file's, dequantised by transformers to float32.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import orjson

from kvaudit.errors import EngineError
from kvaudit.models.fetch import CACHE_VARIABLE, announce, cache_folder, only_process
from kvaudit.models.files import ModelFiles, resolve_model, weight_digest

FORMAT = "1"
"""Of what is written; another one is written anew."""
_NOTE = "kvaudit.json"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that vLLM can load.

    `files` are the model's own, `path` is the folder for vLLM: the model's own too, or what was written of a GGUF file.
    `weights_sha256` is the digest of `files`, which is what the embedded engine calls the same model, and
    `folder_sha256` that of the weights in `path`; they are equal where nothing was written.
    """

    files: ModelFiles
    path: Path
    weights_sha256: str
    folder_sha256: str

    def describe(self) -> dict[str, object]:
        written = {} if self.files.gguf_file is None else {"folder_weights_sha256": self.folder_sha256}
        return {"model": self.files.name, "weights_sha256": self.weights_sha256, **written}


def model_folder(name: str) -> ModelFolder:
    """The folder of a model, fetched and written first where it is not on this machine.

    `name` is whatever the embedded engine takes. Raises UsageError for a model that is none, EngineError for one that
    cannot be fetched, read or kept.
    """

    files = resolve_model(name)
    digest = weight_digest(files)
    if files.gguf_file is None:
        return ModelFolder(files, files.folder, digest, digest)
    place = cache_folder() / "folders" / hashlib.sha256(f"{FORMAT}\n{digest}".encode()).hexdigest()[:24]
    written = _written_digest(name, place)
    if written is None:
        written = _written_once(files, digest, place)
    return ModelFolder(files, place, digest, written)


def _written_once(files: ModelFiles, digest: str, place: Path) -> str:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with only_process(place.with_suffix(".lock"), "writing the model"):
            return _written_digest(files.name, place) or _write(files, digest, place)
    except OSError as error:
        raise EngineError(
            f"model {files.name!r} cannot be written to {place.parent}: {error.strerror or error}",
            f"free space there, or name another folder in {CACHE_VARIABLE}",
        ) from error


def _written_digest(name: str, place: Path) -> str | None:
    """The digest of the weights in a folder that was written before; None where it is missing or damaged."""

    try:
        noted = orjson.loads((place / _NOTE).read_bytes())["folder_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = weight_digest(ModelFiles(name, place))
    return found if found == noted else None


def _write(files: ModelFiles, digest: str, place: Path) -> str:

    announce(f"writing the model {files.name} once as a folder that vLLM loads, into {place.parent}")
    temporary = Path(mkdtemp(prefix="writing-", dir=place.parent))
    try:
        _save(files, temporary)
        written = weight_digest(ModelFiles(files.name, temporary))
        note = {"model": files.name, "format": FORMAT, "weights_sha256": digest, "folder_sha256": written}
        (temporary / _NOTE).write_bytes(orjson.dumps(note, option=orjson.OPT_INDENT_2))
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(place, ignore_errors=True)
        os.replace(temporary, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return written


def _save(files: ModelFiles, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from kvaudit.models.gguf_file import check_gguf, parsed_once
    from kvaudit.models.quiet import quietly
    from kvaudit.models.tokenizer import load_with_original

    with quietly(f"model {files.name!r}"), parsed_once():
        check_gguf(files.weight_files[0])
        model = AutoModelForCausalLM.from_pretrained(
            files.folder, gguf_file=files.gguf_file, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        _forget_quantisation(model)
        model.save_pretrained(target, max_shard_size="100GB")
        load_with_original(files)[1].save_pretrained(target)


def _forget_quantisation(model: Any) -> None:
    """The weights are dequantised already; transformers would refuse to write them as they are marked."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
