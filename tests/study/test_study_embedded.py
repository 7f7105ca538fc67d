"""A study on the embedded engine: that work which is not done twice would have come out the same."""

from dataclasses import replace

import pytest
import torch
from fakes import rolling_trace, run_scripted
from studies import run_study
from tiny_models import TinyTokenizer, tiny_model

from kvaudit.engines import EngineSettings, Switches
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.store import open_run
from kvaudit.study.grid import canonical, leaves_no_choice

TRACE = rolling_trace(5, window=3, max_tokens=4)
TIMES = ["ttft_ms", "total_ms"]
EXACT = {"mask": "exact", "gap": "recompute"}
WEIGHTS = weights_of(tiny_model("llama"), torch.float32, torch.device("cpu"))


def open_tiny(settings):
    return EmbeddedEngine(WEIGHTS, TinyTokenizer(), settings, {"model": "tiny"})


def ran(path, *, policies=("token-topk", "document-aligned", "none"), trace=TRACE, ratio=0.3, **switches):
    settings = EngineSettings(switches=replace(Switches(), **switches), recompute_ratio=ratio)
    return run_scripted(path, trace, settings, policies=policies, orders=2, open_engine=open_tiny)


def outcome(run, policy=None):
    """Everything that a run measured but the times; of one policy without the names of its arms, and without what only
    policies have that read a signal: the rounding control, and how many tokens rounding chose."""
    tables = {name: run.table(name).to_pylist() for name in ("observations", "selections", "provenance", "writes")}
    for name, rows in tables.items():
        if policy is not None:
            rows = [row for row in rows if row["arm_id"].split(".")[0] == policy and "rounding" not in row["arm_id"]]
            rows = [
                row | {"arm_id": row["arm_id"].partition(".")[2]} | ({"policy": ""} if "policy" in row else {})
                for row in rows
            ]
        left_out = TIMES if policy is None else (*TIMES, "rounding_tokens")
        tables[name] = [{key: value for key, value in row.items() if key not in left_out} for row in rows]
    return tables


@pytest.mark.parametrize(
    ("switches", "others"),
    [
        ({"write_back": "isolated"}, {}),
        ({"write_back": "isolated", **EXACT}, {}),
        ({"write_back": "versioned"}, {}),
        ({"write_back": "versioned", "mask": "exact", "gap": "zero"}, {}),
        ({"write_back": "versioned", "mask": "bottom-right", "gap": "store"}, {}),
        ({"write_back": "none", "mask": "bottom-right", "gap": "zero"}, EXACT),
        ({"write_back": "none", "mask": "bottom-right", "gap": "store"}, EXACT),
    ],
)
def test_switches_that_stand_for_each_other_give_the_same_result(tmp_path, switches, others):
    one = {**switches, "lookup": "any"}
    other = {**switches, "lookup": "stop-at-miss", **others}
    assert canonical("embedded", Switches(**one))[0] == canonical("embedded", Switches(**other))[0]
    trace = rolling_trace(5, window=3, prelude=True, max_tokens=4)
    left, right = (outcome(ran(tmp_path / name, trace=trace, **kind)) for name, kind in (("l", one), ("r", other)))
    assert left == right


def test_what_does_not_stand_for_another_differs(tmp_path):
    """The same comparison, where lookups do differ: it can tell."""
    trace = rolling_trace(6, window=3, max_tokens=4)
    assert canonical("embedded", Switches(lookup="stop-at-miss"))[1] == ""
    left, right = (outcome(ran(tmp_path / name, trace=trace, lookup=name, **EXACT)) for name in ("any", "stop-at-miss"))
    assert left != right


@pytest.mark.parametrize("policy", ["none", "all"])
def test_policies_without_a_ratio_give_the_same_result_at_every_ratio(tmp_path, policy):
    low, high = (outcome(ran(tmp_path / str(ratio), policies=(policy,), ratio=ratio)) for ratio in (0.01, 0.5))
    assert low == high


@pytest.mark.parametrize(
    "switches",
    [{"write_back": "none"}, {"lookup": "vllm-prefix", **EXACT}, {"lookup": "sglang-prefix", **EXACT}],
)
def test_where_no_token_is_left_to_a_policy_all_give_the_same_result(tmp_path, switches):
    assert leaves_no_choice("embedded", Switches(**switches))
    policies = ("token-topk", "document-aligned", "legolink", "none")
    run = ran(tmp_path / "run", policies=policies, **switches)
    first, *others = (outcome(run, policy) for policy in policies)
    assert first["observations"]
    assert {row["reusable_tokens"] for row in first["observations"]} == {0}
    assert others == [first] * 3


def test_shared_full_prefill_is_what_a_cell_would_have_computed(tmp_path):
    run_study(tmp_path / "s", "switches", trace=TRACE, open_engine=open_tiny, fixed=("lookup", "write_back", "mask"))
    for gap in ("recompute", "zero", "store"):
        shared = open_run(tmp_path / "s" / "cells" / gap)
        shared.check()
        alone = ran(tmp_path / gap, policies=("token-topk",), ratio=0.5, gap=gap)
        assert shared.table("references") == alone.table("references")
        assert outcome(shared) == outcome(alone)
