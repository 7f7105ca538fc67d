"""What the embedded engine refuses before it loads anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.embedded import open_engine
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.errors import KvauditError, UsageError
from kvaudit.models import files as models


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(name: str) -> None:
        raise AssertionError(f"{name} was resolved")

    monkeypatch.setattr(models, "resolve_model", unexpected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"options": {"fault": "none"}}, "engine 'embedded' has no option 'fault'"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_engine(replace(EngineSettings(), **change))  # type: ignore[arg-type]


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch sees no CUDA device"):
        open_engine(EngineSettings(device="cuda"))


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_check_layer_that_the_model_does_not_have(layer: int) -> None:
    weights = weights_of(tiny_model("llama"), torch.float32, torch.device("cpu"))
    with pytest.raises(KvauditError, match=f"check layer {layer} does not exist"):
        EmbeddedEngine(weights, TinyTokenizer(), EngineSettings(switches=Switches(check_layer=layer)), {})
