"""The checks find the embedded engine's switches, on a tiny seeded model and on the real small one."""

from __future__ import annotations

import random

import pytest
from check_expectations import EVERY, expected, finding_of, found, reuses_behind_another, told
from tiny_engines import tiny_engine

from kvaudit.doctor.checks import CHECKS, NOISE, run_checks
from kvaudit.engines import PREFIX_LOOKUPS, PRESETS, EngineSettings, Switches

DRAWN = random.Random(6).sample(EVERY, 8)
MORE = random.Random(7).sample(EVERY, 96)
KEPT = "every new chunk was stored"
EXACT = "repeats and launches are equal bit for bit"


def name_of(switches):
    return "-".join(str(getattr(switches, name)) for name in ("mask", "gap", "lookup", "write_back", "suffix", "keys"))


def assert_found(switches):
    findings = run_checks(lambda: tiny_engine(switches))
    assert [finding.check for finding in findings] == [NOISE, *CHECKS]
    assert all(finding.outcome != "failed" for finding in findings), findings
    assert told(findings) == expected(switches)
    for finding in findings:
        assert (finding.value is None) == (finding.outcome == "inconclusive") == (finding.reason is not None)
    noise, blends = finding_of(findings, NOISE), expected(switches)["causality"] is not None
    assert noise.value == (EXACT if blends else None)
    assert ("relative" in noise.evidence) == blends
    if switches.lookup not in PREFIX_LOOKUPS:
        assert finding_of(findings, "save loss").value in (KEPT, None)
        assert (finding_of(findings, "save loss").value is None) == (not reuses_behind_another(switches))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset):
    assert_found(PRESETS[preset])


@pytest.mark.parametrize("switches", DRAWN, ids=name_of)
def test_drawn_switches(switches):
    assert_found(switches)


@pytest.mark.slow
@pytest.mark.parametrize("switches", MORE, ids=name_of)
def test_a_third_of_all_combinations(switches):
    assert_found(switches)


@pytest.mark.parametrize("check_layer", [0, 2])
@pytest.mark.parametrize("check", expected(Switches()))
def test_other_check_layers(check, check_layer):
    finding = found(check, tiny_engine(Switches(check_layer=check_layer)))
    if (check, check_layer) == ("causality", 2):
        assert "last layer" in finding.reason
    else:
        assert finding.switch == expected(Switches())[check]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("check", expected(Switches()))
def test_other_families(check, family):
    assert found(check, tiny_engine(Switches(), family)).switch == expected(Switches())[check]


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("preset", ["ideal", "unmoved"])
def test_other_rotary_variants(preset, rope):
    finding = found("position", tiny_engine(PRESETS[preset], rope=rope))
    assert finding.switch == f"--keys {PRESETS[preset].keys}"


def test_a_prefix_cache_has_nothing_to_blend():
    findings = run_checks(lambda: tiny_engine(PRESETS["vllm"]))
    for check in ("causality", "gap", "position"):
        assert "nothing to blend" in finding_of(findings, check).reason
    assert (
        finding_of(findings, "save loss").value
        == "new chunks of up to 1 token, of 1 to 32 that were tried, are lost in new prompts and behind a hit"
    )


def test_a_small_cache_is_no_loss():
    finding = found("save loss", tiny_engine(Switches(capacity_bytes=40 * 768)))
    assert finding.outcome == "inconclusive"
    assert "evicted" in finding.reason


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("preset", ["lmcache", "unmoved"])
def test_presets_on_the_real_model(preset):
    from kvaudit.engines.embedded import open_engine

    switches = PRESETS[preset]
    held = open_engine(EngineSettings(device="cpu"))
    findings = run_checks(lambda: open_engine(EngineSettings(device="cpu", switches=switches)))
    held.close()
    assert all(finding.outcome != "failed" for finding in findings), findings
    assert told(findings) == expected(switches)
