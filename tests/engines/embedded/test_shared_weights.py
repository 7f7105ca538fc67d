"""An engine that is opened beside another over the same weights loads nothing; alone, it loads them anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.embedded import open_engine, weights
from kvaudit.models import files as models
from kvaudit.models import tokenizer
from kvaudit.records import Prompt, PromptSegment, Sampling

SETTINGS = EngineSettings(device="cpu", model="tiny")


class FoundTokenizer(TinyTokenizer):
    end_ids = frozenset[int]()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded, model by model; a file's content is its digest."""
    loaded: list[str] = []

    def load(files: models.ModelFiles, dtype: torch.dtype, device: torch.device, end_ids: Any) -> weights.Weights:
        loaded.append(files.name)
        return weights.weights_of(tiny_model("llama", len(loaded)), dtype, device)

    monkeypatch.setattr(models, "resolve_model", lambda name: models.ModelFiles(name, Path("/models") / name))
    monkeypatch.setattr(models, "weight_digest", lambda files: f"digest of {files.name}")
    monkeypatch.setattr(weights, "load_weights", load)
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda files: FoundTokenizer())
    return loaded


def test_beside_another_nothing_is_loaded(loads: list[str]) -> None:
    first = open_engine(SETTINGS)
    second = open_engine(replace(SETTINGS, switches=Switches(mask="exact"), recompute_ratio=0.5))
    assert loads == ["tiny"]
    assert second.transformer.weights is first.transformer.weights  # type: ignore[attr-defined]
    assert second.describe()["recompute_ratio"] == 0.5


def test_a_closed_engine_that_is_held_still_shares(loads: list[str]) -> None:
    first = open_engine(SETTINGS)
    first.close()
    second = open_engine(SETTINGS)
    del first
    third = open_engine(SETTINGS)
    assert loads == ["tiny"]
    assert third.transformer.weights is second.transformer.weights  # type: ignore[attr-defined]


def test_alone_they_are_loaded_anew(loads: list[str]) -> None:
    first = open_engine(SETTINGS)
    del first
    open_engine(SETTINGS)
    assert loads == ["tiny", "tiny"]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: {"model": "other"},
        lambda patch: {"dtype": "bfloat16"},
        lambda patch: patch.setattr(models, "weight_digest", lambda files: "changed on disk"),
    ],
)
def test_other_weights_are_not_shared(
    loads: list[str], monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], dict[str, str] | None]
) -> None:
    first = open_engine(SETTINGS)
    second = open_engine(replace(SETTINGS, **(change(monkeypatch) or {})))  # type: ignore[arg-type]
    assert len(loads) == 2
    assert second.transformer.weights is not first.transformer.weights  # type: ignore[attr-defined]


def test_the_cache_is_not_shared(loads: list[str]) -> None:
    first, second = open_engine(SETTINGS), open_engine(SETTINGS)
    prompt = Prompt((5, 6, 7, 8), (PromptSegment("document", "d", 0, 3), PromptSegment("query", "q", 3, 4)))
    from kvaudit.policies.bounds import ReuseAll

    first.serve("r0", "prelude", prompt, Sampling(0), ReuseAll())
    assert len(first.cache) > 0  # type: ignore[attr-defined]
    assert len(second.cache) == 0  # type: ignore[attr-defined]
