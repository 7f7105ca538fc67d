"""A GGUF file becomes a folder that vLLM loads, once; any other model stays where it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvaudit.engines.embedded.weights import load_weights
from kvaudit.engines.vllm import folder as folders
from kvaudit.engines.vllm.folder import model_folder
from kvaudit.errors import EngineError
from kvaudit.models.files import ModelFiles, resolve_model, weight_digest
from kvaudit.models.tokenizer import load_tokenizer


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A model in a GGUF file, and the writing of a folder replaced by something quick; what was written, in order."""
    monkeypatch.setenv("KVAUDIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF weights")
    written = []

    def save(files, target):
        written.append(files.name)
        (target / "model.safetensors").write_bytes(b"weights " + path.read_bytes())
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(folders, "_save", save)
    return path, written


def test_a_folder_of_safetensors_is_passed_through(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    made = model_folder(str(tmp_path))
    assert made.path == tmp_path
    assert made.weights_sha256 == made.folder_sha256 == weight_digest(made.files)
    assert "folder_weights_sha256" not in made.describe()


def test_a_gguf_file_is_written_once(gguf, capsys):
    path, written = gguf
    first = model_folder(str(path))
    assert "writing the model" in capsys.readouterr().err
    assert model_folder(str(path)) == first
    assert written == [str(path)]
    assert capsys.readouterr().err == ""
    assert first.weights_sha256 == weight_digest(resolve_model(str(path)))
    assert first.folder_sha256 == weight_digest(ModelFiles("x", first.path)) != first.weights_sha256
    assert first.describe()["folder_weights_sha256"] == first.folder_sha256


def test_another_file_gets_another_folder(gguf):
    path, written = gguf
    first = model_folder(str(path))
    path.write_bytes(b"GGUF other weights")
    second = model_folder(str(path))
    assert first.path != second.path
    assert len(written) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "kvaudit.json"])
def test_a_damaged_folder_is_written_anew(gguf, name):
    path, written = gguf
    first = model_folder(str(path))
    (first.path / name).write_bytes(b"damaged")
    assert model_folder(str(path)) == first
    assert len(written) == 2


def test_nothing_partial_stays_where_writing_fails(gguf, monkeypatch):
    path, _ = gguf

    def fail(files, target):
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    save = folders._save
    monkeypatch.setattr(folders, "_save", fail)
    with pytest.raises(EngineError, match=r"cannot be written to .*: No space left on device"):
        model_folder(str(path))
    folder = folders.cache_folder() / "folders"
    assert [each.suffix for each in folder.iterdir()] == [".lock"]
    monkeypatch.setattr(folders, "_save", save)
    assert model_folder(str(path)).path.is_dir()


@pytest.mark.model
def test_the_built_in_models_folder_holds_the_embedded_engines_weights_and_tokenizer():
    made = model_folder("smollm2-135m")
    ours = load_weights(made.files, torch.float32, torch.device("cpu"))
    theirs = load_weights(ModelFiles("folder", made.path), torch.float32, torch.device("cpu"))
    assert torch.equal(ours.embedding, theirs.embedding)
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(own.qkv.weight, other.qkv.weight)
        assert torch.equal(own.down.weight, other.down.weight)
    assert torch.equal(ours.inverse_frequencies, theirs.inverse_frequencies)
    assert replace(ours, **_tensors(theirs)) == replace(theirs, **_tensors(theirs))
    text = "date,symbol\n # # 2013-01-02 \u4f60\u597d<|im_start|>"
    assert load_tokenizer(made.files).encode(text) == load_tokenizer(ModelFiles("folder", made.path)).encode(text)


def _tensors(weights):
    names = ("embedding", "layers", "norm", "head", "inverse_frequencies")
    return {name: getattr(weights, name) for name in names}
