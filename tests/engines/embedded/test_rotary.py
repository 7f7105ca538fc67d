from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILY_SETTINGS, ROTARY, tiny_config, tiny_model
from transformers import AutoConfig

from kvaudit.engines.embedded.rotary import rotary_frequencies
from kvaudit.errors import UsageError


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
@pytest.mark.parametrize("rope", ROTARY)
def test_frequencies_are_those_of_the_transformers_module(family: str, rope: str) -> None:
    module = tiny_model(family, rope=rope).model.rotary_emb

    frequencies, factor = rotary_frequencies(tiny_config(family, rope))

    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, module.inv_freq)
    assert factor == module.attention_scaling


def test_variants_differ() -> None:
    found = {rope: rotary_frequencies(tiny_config("llama", rope)) for rope in ROTARY}

    assert len({tuple(frequencies.tolist()) for frequencies, _ in found.values()}) == len(ROTARY)
    assert found["yarn"][1] > 1.0
    assert found["default"][1] == found["linear"][1] == found["llama3"][1] == 1.0


def test_a_config_in_the_old_format_is_read(tmp_path: Path) -> None:
    settings = tiny_config("llama").to_dict()
    del settings["rope_parameters"]
    settings |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(settings))

    frequencies, _ = rotary_frequencies(AutoConfig.from_pretrained(tmp_path))

    expected = [500.0 ** (-index / 8) / 2 for index in range(8)]
    assert frequencies.tolist() == pytest.approx(expected)


def test_another_variant_is_refused_by_name() -> None:
    config = tiny_config("llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})

    with pytest.raises(UsageError, match=r"'dynamic'.*default, linear, llama3, yarn"):
        rotary_frequencies(config)


def test_a_partial_rotation_is_refused() -> None:
    config = tiny_config("llama", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5})

    with pytest.raises(UsageError, match=r"partial rotary factor of 0\.5"):
        rotary_frequencies(config)
