"""What is read of a model's configuration before vLLM starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvaudit.engines.scripted import ByteTokenizer
from kvaudit.engines.vllm.folder import ModelFolder
from kvaudit.engines.vllm.starting import Place
from kvaudit.models.files import ModelFiles

FOLDER = ModelFolder(ModelFiles("tiny", Path(), None), Path(), "", "")
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, ""),
        ({"rope_scaling": None}, ""),
        ({"rope_parameters": PLAIN}, ""),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
    ids=["nothing", "null", "plain", "new-key", "old-key", "plain-beside-scaled"],
)
def test_a_scaled_rotation_is_found_under_either_key(config, found):
    place = Place("cpu", FOLDER, config, ByteTokenizer(), frozenset(), 64, {}, "float32")
    assert place.rope_type == found
