"""Options of the real engines are read and checked before anything is started."""

from __future__ import annotations

import pytest

from kvaudit.engines import PRESETS, EngineSettings, Switches
from kvaudit.engines.vllm.options import check_own_switches, read_options
from kvaudit.errors import UsageError
from kvaudit.plan import make_plan


def read(engine="lmcache", dtype="float32", **options):
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return read_options(engine, EngineSettings(dtype=dtype, options=named))


def test_without_options_everything_is_left_to_the_engine():
    options = read()
    assert (options.prefix_caching, options.separator, options.max_model_len) == (None, None, None)
    assert options.cuda_graphs is False
    assert options.start_seconds == options.answer_seconds == 600


def test_options_are_read():
    options = read(
        prefix_caching="on",
        max_model_len="512",
        max_num_batched_tokens="256",
        cuda_graphs="on",
        gpu_memory_utilization="0.5",
        start_timeout="30",
        answer_timeout="20",
        separator="\n\n",
    )
    assert (options.prefix_caching, options.cuda_graphs) == (True, True)
    assert (options.max_model_len, options.max_num_batched_tokens) == (512, 256)
    assert (options.gpu_memory_utilization, options.start_seconds, options.answer_seconds) == (0.5, 30, 20)
    assert options.separator == "\n\n"
    assert read(prefix_caching="off").prefix_caching is False


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"colour": "red"}, "engine 'lmcache' has no option 'colour'"),
        ({"in_process": "on"}, "engine 'lmcache' has no option 'in-process'"),
        ({"prefix_caching": "yes"}, "prefix-caching is 'yes'"),
        ({"max_model_len": "0"}, "max-model-len is '0'"),
        ({"max_model_len": "-3"}, "max-model-len is '-3'"),
        ({"gpu_memory_utilization": "90"}, "gpu-memory-utilization is '90'"),
        ({"gpu_memory_utilization": "nan"}, "gpu-memory-utilization is 'nan'"),
        ({"separator": ""}, "the separator is empty"),
        ({"dtype": "int4"}, "unknown dtype 'int4'"),
    ],
)
def test_what_is_no_option_is_refused(options, told):
    with pytest.raises(UsageError, match=told):
        read(**options)


def test_a_separator_is_an_option_of_lmcache_alone():
    with pytest.raises(UsageError, match="engine 'vllm' has no option 'separator'"):
        read("vllm", separator="x")


def test_a_real_engine_takes_its_own_switches_only():
    own = PRESETS["lmcache"]
    check_own_switches("lmcache", own, own)
    check_own_switches("vllm", own, PRESETS["vllm"])
    check_own_switches("vllm", PRESETS["vllm"], PRESETS["vllm"])
    check_own_switches("lmcache", Switches(check_layer=2), own, frozenset({"check_layer"}))
    with pytest.raises(UsageError, match="mask 'exact', suffix 'with-rows' cannot be set"):
        check_own_switches("lmcache", Switches("exact", suffix="with-rows"), own)
    with pytest.raises(UsageError, match="check-layer 2 cannot be set"):
        check_own_switches("vllm", Switches(check_layer=2), PRESETS["vllm"])


def test_lmcaches_own_selection_is_refused_elsewhere_before_anything_is_opened():
    assert make_plan(3, "lmcache", EngineSettings(), ["lmcache-default"], 2).policies == ("lmcache-default",)
    with pytest.raises(UsageError, match="'lmcache-default' is the selection of engine 'lmcache' itself"):
        make_plan(3, "embedded", EngineSettings(), ["token-topk", "lmcache-default"], 2)


def test_what_vllm_computes_with_is_part_of_its_audit():
    data = make_plan(3, "vllm", EngineSettings(dtype="bfloat16"), (), 2).as_data()
    assert (data["dtype"], data["device"]) == ("bfloat16", "auto")
    assert "recompute_ratio" not in data
