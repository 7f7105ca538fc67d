"""The checks on real vLLM and real LMCache: DESIGN's facts of it, found without reading its code."""

from __future__ import annotations

import pytest
from check_expectations import expected, finding_of, told

from kvaudit.doctor.checks import NOISE, run_checks
from kvaudit.engines import PRESETS, EngineSettings
from kvaudit.plugins import load

pytestmark = [pytest.mark.real, pytest.mark.model]


@pytest.fixture(scope="module")
def findings():
    settings = EngineSettings(options={"max-model-len": "1024"})
    return run_checks(lambda: load("engines", "lmcache")(settings))


def test_no_check_fails(findings):
    assert [finding for finding in findings if finding.outcome != "seen"] == []


@pytest.mark.parametrize("check", expected(PRESETS["lmcache"]))
def test_what_lmcache_does_is_what_its_preset_says(findings, check):
    assert told(findings)[check] == expected(PRESETS["lmcache"])[check]


def test_repeats_and_launches_give_the_same_tokens(findings):
    assert finding_of(findings, NOISE).value != "tokens differ between repeats"


def test_a_new_chunk_behind_a_hit_is_lost_where_the_prompt_ends_before_the_next_multiple_of_the_chunk_size(findings):
    """LMCache's adapter skips the save there (`chunk_boundary` in `vllm_v1_adapter.py`, 0.5.6); never in a cold prompt.

    With 16 tokens a chunk that is one of the trials: a hit of 32 tokens, and 41 tokens in all.
    """
    evidence = finding_of(findings, "save loss").evidence
    assert (evidence["lost in new prompts"], evidence["lost behind a hit"]) == (0, 1)
