"""What would spoil an audit of LMCache is told before anything is started, with its fix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvaudit.engines.vllm.settings import (
    CHECK_LAYERS,
    CHUNK_SIZE,
    CONFIG_FILE,
    DEFAULTS,
    LEAST_HIT,
    RATIOS,
    SPECIAL_STRING,
    Setup,
    as_lmcache_reads,
    findings,
    in_manifest,
    refuse,
    separator_string,
)
from kvaudit.errors import UsageError

SOUND = Setup(
    lmcache={**DEFAULTS, CHECK_LAYERS: "1", RATIOS: "0.15", SPECIAL_STRING: "'x # # '"},
    separator=(7, 7, 9),
    found_separator=(7, 7, 9),
    architecture="LlamaForCausalLM",
    rope_type="default",
    layers=30,
    longest=4096,
    batched=4096,
)


def with_variable(name, value):
    return replace(SOUND, lmcache={**SOUND.lmcache, name: value})


def without(name):
    return replace(SOUND, lmcache={key: value for key, value in SOUND.lmcache.items() if key != name})


SPOILED = {
    "prefix-caching": [replace(SOUND, prefix_caching=True)],
    "chunked-prefill": [replace(SOUND, batched=2048)],
    "cuda-graphs": [replace(SOUND, cuda_graphs=True)],
    "config-file": [with_variable(CONFIG_FILE, "lmcache.yaml")],
    "blending": [with_variable("LMCACHE_ENABLE_BLENDING", "False"), without("LMCACHE_USE_LAYERWISE")],
    "backends": [
        with_variable("LMCACHE_LOCAL_DISK", "file:///tmp/kv"),
        with_variable("LMCACHE_REMOTE_URL", "redis://host:6379"),
    ],
    "check-layer": [with_variable(CHECK_LAYERS, "30")],
    "shortest-hit": [with_variable(LEAST_HIT, "64"), with_variable(LEAST_HIT, "some")],
    "separator": [
        with_variable(SPECIAL_STRING, " # # "),
        replace(with_variable(SPECIAL_STRING, ""), separator=(), found_separator=()),
    ],
    "leading-token": [replace(SOUND, found_separator=(7, 9))],
    "model": [replace(SOUND, architecture="MistralForCausalLM")],
    "rope-scaling": [replace(SOUND, rope_type="llama3")],
    "chunk-size": [with_variable(CHUNK_SIZE, value) for value in ("0", "many", "", "'16'", "16.0", "inf", "nan", "-1")],
}


def test_sound_settings_have_nothing_wrong():
    assert findings(SOUND) == ()
    refuse(findings(SOUND))


@pytest.mark.parametrize(("name", "setup"), [(name, setup) for name, setups in SPOILED.items() for setup in setups])
def test_each_setting_that_spoils_an_audit_is_refused_by_name_with_its_fix(name, setup):
    (finding,) = findings(setup)
    assert (finding.name, finding.spoils) == (name, True)
    with pytest.raises(UsageError, match=f"^{name}: ") as raised:
        refuse([finding])
    assert raised.value.hint == finding.fix
    assert "\n" not in str(raised.value)


def test_a_chunk_size_that_loses_saves_is_told_and_audited():
    (finding,) = findings(with_variable(CHUNK_SIZE, "256"))
    assert (finding.name, finding.spoils) == ("chunk-size", False)
    refuse([finding])


def test_every_hit_however_short_is_lmcaches_own_default():
    assert findings(with_variable(LEAST_HIT, "0")) == ()


def test_a_manifest_tells_every_variable_and_of_secrets_a_digest():
    given = {
        "LMCACHE_CACHE_POLICY": "LFU",
        CHUNK_SIZE: "16",
        "LMCACHE_MIN_RETRIEVE_TOKENS": "0",
        "LMCACHE_API_KEY": "hidden",
        "LMCACHE_HF_TOKEN": "hidden",
        "LMCACHE_EXTRA_CONFIG": '{"secret": "hidden"}',
    }
    told = in_manifest(given)
    assert told.keys() == given.keys()
    assert {name for name in given if told[name] == given[name]} == {
        "LMCACHE_CACHE_POLICY",
        CHUNK_SIZE,
        "LMCACHE_MIN_RETRIEVE_TOKENS",
    }
    assert "hidden" not in str(told)
    assert told["LMCACHE_API_KEY"] != in_manifest({"LMCACHE_API_KEY": "other"})["LMCACHE_API_KEY"]


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(UsageError, match=r"prefix-caching: .*; cuda-graphs: "):
        refuse(findings(replace(SOUND, prefix_caching=True, cuda_graphs=True)))


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (" # # ", "# #"),
        ("' # # '", " # # "),
        ('" # # "', " # # "),
        ("'\\n\\n'", "\n\n"),
        ("'it's'", "it's"),
        ("", ""),
        ("'", "'"),
    ],
)
def test_an_environment_variable_is_read_as_lmcache_reads_it(value, read):
    assert as_lmcache_reads(value) == read


@pytest.mark.real
@pytest.mark.parametrize("value", [" # # ", "' # # '", '" # # "', "'\\n\\n'", "'it's'", "", "'", "\"a'", " 'x' "])
def test_lmcache_itself_reads_an_environment_variable_so(value):
    from lmcache.v1.config_base import _parse_quoted_string

    assert as_lmcache_reads(value) == _parse_quoted_string(value)


def characters(text):
    return [ord(character) for character in text]


def test_a_tokenizer_with_a_begin_token_needs_nothing_before_the_separator():
    assert separator_string("##", characters("##"), [1], characters) == "##"


def test_without_one_a_character_goes_before_it_to_be_dropped():
    assert separator_string("##", characters("##"), [], characters) == "x##"


def test_a_character_that_would_change_the_separators_tokens_is_not_taken():
    def merging(text):
        return [0] if text.startswith("x") else characters(text)

    assert separator_string("##", characters("##"), [], merging) == "a##"


def test_no_string_is_given_where_none_helps():
    assert separator_string("##", characters("##"), [], lambda text: [len(text)]) is None
