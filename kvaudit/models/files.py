"""Where a model's files are: the default model, a local folder, a GGUF file, or the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import orjson

from kvaudit.errors import EngineError, UsageError
from kvaudit.models.fetch import KNOWN_MODELS, announce, fetched
from kvaudit.models.quiet import first_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_PATTERNS = ["*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja"]
SINGLE_FILE = "model.safetensors"
SHARD_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine: `folder` holds its files, `gguf_file` names the one that holds everything."""

    name: str
    folder: Path
    gguf_file: str | None = None

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights, by name. Raises UsageError for a folder that holds none or not all."""
        if self.gguf_file is not None:
            return (self.folder / self.gguf_file,)
        if (self.folder / SINGLE_FILE).is_file():
            return (self.folder / SINGLE_FILE,)
        if (self.folder / SHARD_INDEX).is_file():
            return self._shards()
        pickled = any(self.folder.glob("*.bin")) or any(self.folder.glob("*.pt*"))
        reason = ": it holds pickled weights, which are never loaded" if pickled else ""
        raise UsageError(
            f"model {self.name!r}: no weights in {self.folder}{reason}",
            f"needs {SINGLE_FILE} or one .gguf file; {_known()}",
        )

    def _shards(self) -> tuple[Path, ...]:
        index = self.folder / SHARD_INDEX
        try:
            names = sorted(set(orjson.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"model {self.name!r}: {index} is no index of safetensors files") from error
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise UsageError(
                f"model {self.name!r}: {missing[0]} is missing in {self.folder}",
                f"{SHARD_INDEX} names {len(names)} files, {len(missing)} of them missing",
            )
        return tuple(self.folder / name for name in names)


def resolve_model(name: str) -> ModelFiles:
    """The files of a model, fetched first where they are not on this machine.

    `name` is a known name, a folder with config.json and safetensors or with one .gguf file, a path to a .gguf
    file, or a Hugging Face id (org/name). Raises UsageError for anything else, EngineError when a fetch fails.
    """
    if name in KNOWN_MODELS:
        known = KNOWN_MODELS[name]
        return ModelFiles(name, fetched(known), known.gguf_file)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(f"model {name!r} is neither a folder nor a .gguf file", _known())
        return ModelFiles(name, path.parent, path.name)
    if HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _from_hub(name)
    raise UsageError(f"unknown model {name!r}: no such file or folder", _known())


def _known() -> str:
    return f"known: {', '.join(KNOWN_MODELS)}, or a folder, a .gguf file, a Hugging Face id"


def _folder(name: str, folder: Path) -> ModelFiles:
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs and not any((folder / weights).is_file() for weights in (SINGLE_FILE, SHARD_INDEX)):
        if len(ggufs) > 1:
            raise UsageError(f"model {name!r}: {len(ggufs)} .gguf files in {folder}", f"name one: {', '.join(ggufs)}")
        return ModelFiles(name, folder, ggufs[0])
    files = ModelFiles(name, folder)
    if files.weight_files and not (folder / "config.json").is_file():
        raise UsageError(f"model {name!r}: no config.json in {folder}", _known())
    return files


def _from_hub(name: str) -> ModelFiles:
    try:
        return _folder(name, _snapshot(name, local_files_only=True))
    except (UsageError, EngineError):  # not on this machine yet, or not all of it
        announce(f"fetching {name} from the Hugging Face Hub")
        return _folder(name, _snapshot(name, local_files_only=False))


def _snapshot(name: str, local_files_only: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    bars_shown = not are_progress_bars_disabled()
    if local_files_only or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=HUB_PATTERNS, ignore_patterns=["*/*"], local_files_only=local_files_only
        )
    except errors.GatedRepoError as error:
        raise UsageError(
            f"model {name!r} is gated on the Hugging Face Hub", "ask for access, then hf auth login"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise UsageError(
            f"unknown model {name!r}: no such folder, and the Hugging Face Hub does not know it", _known()
        ) from error
    except (OSError, ValueError) as error:
        raise EngineError(
            f"model {name!r}: no such folder, and the Hugging Face Hub cannot be reached: {first_line(error)}", _known()
        ) from error
    finally:
        if bars_shown:
            enable_progress_bars()
    return Path(folder)


def weight_digest(files: ModelFiles) -> str:
    """SHA-256 over the weight files: per file, in the order of their names, its name, its size and its content."""
    digest = hashlib.sha256()
    for path in files.weight_files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
