from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from kvaudit.errors import EngineError, UsageError
from kvaudit.models import files as models
from kvaudit.models.files import resolve_model

INDEX = "model.safetensors.index.json"


def folder_of(root: Path, *names: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in names:
        (root / name).write_bytes(b"x")
    return root


def test_the_known_model_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def fetched(model: Any) -> Path:
        asked.append(model.name)
        return tmp_path

    monkeypatch.setattr(models, "fetched", fetched)

    files = resolve_model("smollm2-135m")

    assert asked == ["smollm2-135m"]
    assert (files.name, files.folder, files.gguf_file) == ("smollm2-135m", tmp_path, "SmolLM2-135M-Instruct.Q4_1.gguf")


def test_a_folder_with_safetensors(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", "config.json", "model.safetensors", "other.gguf")

    files = resolve_model(str(folder))

    assert (files.name, files.folder, files.gguf_file) == (str(folder), folder, None)
    assert files.weight_files == (folder / "model.safetensors",)


def test_a_folder_with_shards(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", "config.json", "b.safetensors", "a.safetensors", "unused.safetensors")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}})
    )

    assert resolve_model(str(folder)).weight_files == (folder / "a.safetensors", folder / "b.safetensors")


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", "one.gguf", "README.md")

    files = resolve_model(str(folder))

    assert files.gguf_file == "one.gguf"
    assert files.weight_files == (folder / "one.gguf",)


def test_a_gguf_file_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path / "tiny", "one.gguf", "two.gguf")
    monkeypatch.setenv("HOME", str(tmp_path))

    files = resolve_model("~/tiny/two.gguf")

    assert (files.folder, files.gguf_file) == (tmp_path / "tiny", "two.gguf")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), r"no weights in .*tiny \(.*smollm2-135m"),
        (("config.json", "tokenizer.json"), r"no weights in .*smollm2-135m"),
        (("config.json", "pytorch_model.bin"), r"pickled weights, which are never loaded"),
        (("config.json", "model.pth"), r"pickled weights, which are never loaded"),
        (("model.safetensors",), r"no config\.json in .*smollm2-135m"),
        (("one.gguf", "two.gguf"), r"2 \.gguf files in .*name one: one\.gguf, two\.gguf"),
    ],
)
def test_a_folder_that_holds_no_model_is_refused(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_model(str(folder_of(tmp_path / "tiny", *names)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", "config.json", "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))

    with pytest.raises(UsageError, match=r"b\.safetensors is missing"):
        resolve_model(str(folder))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", "config.json")
    (folder / INDEX).write_text(content)

    with pytest.raises(UsageError, match="is no index of safetensors files"):
        resolve_model(str(folder))


def offline(*arguments: Any, **settings: Any) -> str:
    raise AssertionError("the hub was not to be asked")


@pytest.mark.parametrize("name", ["smollm", "./nowhere", "/no/such/folder", "a/b/c", "", "org/model.gguf", "~/nowhere"])
def test_what_cannot_be_a_hub_id_is_unknown_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match=r"(unknown model|no weights in).*smollm2-135m"):
        resolve_model(name)


def test_another_file_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, "model.bin")

    with pytest.raises(UsageError, match=r"neither a folder nor a \.gguf file.*smollm2-135m"):
        resolve_model(str(tmp_path / "model.bin"))


class FakeHub:
    """Answers of `snapshot_download`, in order; any call beyond them, or with other patterns, is an error."""

    def __init__(self, *answers: tuple[bool, Path | Exception]) -> None:
        self.answers = list(answers)

    def __call__(
        self, name: str, *, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        assert name == "org/tiny"
        assert not any(pattern.endswith((".bin", ".pt", ".pth")) for pattern in allow_patterns)
        assert ignore_patterns == ["*/*"]
        expected, answer = self.answers.pop(0)
        assert local_files_only is expected
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    def install(*answers: tuple[bool, Path | Exception]) -> FakeHub:
        fake = FakeHub(*answers)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        return fake

    return install


NOT_CACHED = errors.LocalEntryNotFoundError("not here")


def test_a_hub_model_on_this_machine_is_used_silently(
    tmp_path: Path, hub: Callable[..., FakeHub], capsys: pytest.CaptureFixture[str]
) -> None:
    hub((True, folder_of(tmp_path / "snapshot", "config.json", "model.safetensors")))

    files = resolve_model("org/tiny")

    assert (files.name, files.folder) == ("org/tiny", tmp_path / "snapshot")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("begun", [False, True])
def test_a_hub_model_is_fetched_when_it_is_not_whole(
    begun: bool, tmp_path: Path, hub: Callable[..., FakeHub], capsys: pytest.CaptureFixture[str]
) -> None:
    partial = folder_of(tmp_path / "partial", "config.json")
    whole = folder_of(tmp_path / "whole", "config.json", "model.safetensors")
    hub((True, partial if begun else NOT_CACHED), (False, whole))

    assert resolve_model("org/tiny").folder == whole
    assert capsys.readouterr().err == "kvaudit: fetching org/tiny from the Hugging Face Hub\n"


def answer(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    return kind(
        "refused\nwith more lines", response=httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    )


@pytest.mark.parametrize(
    ("refusal", "kind", "message"),
    [
        (answer(errors.RepositoryNotFoundError, 404), UsageError, r"unknown model 'org/tiny'.*smollm2-135m"),
        (answer(errors.GatedRepoError, 403), UsageError, r"gated on the Hugging Face Hub.*hf auth login"),
        (errors.LocalEntryNotFoundError("no\nconnection"), EngineError, r"cannot be reached: no \(.*smollm2-135m"),
        (answer(errors.HfHubHTTPError, 500), EngineError, r"cannot be reached: refused"),
        (errors.HFValidationError("bad"), UsageError, r"unknown model 'org/tiny'"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    refusal: Exception, kind: type[Exception], message: str, hub: Callable[..., FakeHub]
) -> None:
    hub((True, NOT_CACHED), (False, refusal))

    with pytest.raises(kind, match=message) as caught:
        resolve_model("org/tiny")
    assert "\n" not in str(caught.value)


def test_a_hub_model_without_safetensors_is_refused(tmp_path: Path, hub: Callable[..., FakeHub]) -> None:
    partial = folder_of(tmp_path / "snapshot", "config.json")
    hub((True, partial), (False, partial))

    with pytest.raises(UsageError, match=r"model 'org/tiny': no weights in"):
        resolve_model("org/tiny")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_hubs_progress_bars_are_for_terminals(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    class Stderr(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    folder = folder_of(tmp_path / "snapshot", "config.json", "model.safetensors")
    disabled: list[bool] = []

    def download(name: str, *, local_files_only: bool, **settings: Any) -> str:
        disabled.append(are_progress_bars_disabled())
        if local_files_only:
            raise NOT_CACHED
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(sys, "stderr", Stderr())
    before = are_progress_bars_disabled()

    resolve_model("org/tiny")

    assert disabled == [True, not terminal]
    assert are_progress_bars_disabled() is before
