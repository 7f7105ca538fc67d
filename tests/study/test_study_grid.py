"""Which cells a study has, and what it does not run twice."""

from dataclasses import replace
from typing import get_args

import pytest

from kvaudit.engines import PREFIX_LOOKUPS, EngineSettings, Gap, Lookup, Mask, Switches, WriteBack, check_switches
from kvaudit.errors import UsageError
from kvaudit.plugins import available
from kvaudit.policies import BudgetContext, SegmentView
from kvaudit.policy_specs import read_policy
from kvaudit.study.grid import AXES, BUDGETS, COSTLY, KINDS, RATIO_FREE, canonical, leaves_no_choice, make_grid

BASE = EngineSettings()
POLICIES = ("token-topk", "document-aligned")


def grid(kind, engine="scripted", policies=POLICIES, fixed=(), **switches):
    settings = replace(BASE, switches=replace(BASE.switches, **switches))
    return make_grid(kind, engine, settings, policies, frozenset(fixed))


def test_a_study_of_policies_is_one_cell_with_all_of_them():
    found = grid("policies")
    assert [(cell.policies, cell.switches, cell.recompute_ratio) for cell in found.cells] == [
        (POLICIES, BASE.switches, BASE.recompute_ratio)
    ]


def test_a_study_of_budgets_has_the_seven_ratios():
    found = grid("budgets")
    assert BUDGETS == (0.01, 0.02, 0.05, 0.10, 0.15, 0.20, 0.50)
    assert [cell.recompute_ratio for cell in found.cells] == list(BUDGETS)
    assert {cell.switches for cell in found.cells} == {BASE.switches}
    assert [cell.name for cell in found.cells][:2] == ["1-percent", "2-percent"]


def test_a_study_of_disciplines_has_every_value_that_the_engines_know():
    found = grid("disciplines")
    plain = [lookup for lookup in get_args(Lookup) if lookup not in PREFIX_LOOKUPS]
    held = {(cell.switches.write_back, cell.switches.lookup) for cell in found.cells}
    assert held >= {(write_back, lookup) for write_back in get_args(WriteBack) for lookup in plain}
    assert {lookup for _, lookup in held} == set(get_args(Lookup))


def test_a_study_of_switches_is_the_whole_factorial():
    found = grid("switches")
    plain = [lookup for lookup in get_args(Lookup) if lookup not in PREFIX_LOOKUPS]
    held = {(c.switches.mask, c.switches.gap, c.switches.lookup, c.switches.write_back) for c in found.cells}
    expected = {
        (mask, gap, lookup, write_back)
        for mask in get_args(Mask)
        for gap in get_args(Gap)
        for lookup in plain
        for write_back in ("first-writer", "isolated")
    }
    assert held == expected
    assert len(found.cells) == len(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["embedded", "scripted"])
def test_names_are_unique_and_fit_a_file_system(kind, engine):
    found = grid(kind, engine)
    names = [cell.name for cell in found.cells]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").replace(".", "").isalnum() for name in names)
    for cell in found.cells:
        check_switches(cell.switches)


def test_what_means_nothing_is_skipped_with_the_reason():
    found = grid("disciplines")
    skipped = {one.name: one.why for one in found.skipped}
    assert "write-back 'last-writer'" in skipped["vllm-prefix.last-writer"]
    assert not {one.name for one in found.skipped} & {cell.name for cell in found.cells}


def test_an_exact_prefix_cache_is_studied_with_the_mask_and_gap_that_it_has():
    (cell,) = [cell for cell in grid("disciplines").cells if cell.name == "vllm-prefix.first-writer"]
    assert (cell.switches.mask, cell.switches.gap) == ("exact", "recompute")
    found = grid("disciplines", fixed=("mask",))
    assert "vllm-prefix.first-writer" in {one.name for one in found.skipped}


def test_what_is_fixed_keeps_its_value():
    found = grid("switches", fixed=("mask", "gap", "lookup"), mask="exact")
    assert [(c.switches.mask, c.switches.gap, c.switches.write_back) for c in found.cells] == [
        ("exact", "zero", "first-writer"),
        ("exact", "zero", "isolated"),
    ]
    assert list(found.axes) == ["write_back"]
    assert len(grid("budgets", fixed=("recompute_ratio",)).cells) == 1


def test_policies_without_a_ratio_run_once():
    found = grid("budgets", policies=("token-topk", "none", "all"))
    assert [cell.policies for cell in found.cells] == [("token-topk", "none", "all"), *[("token-topk",)] * 6]
    assert {(same.policies, same.cell) for same in found.same} == {(("none", "all"), "1-percent")}
    assert len(grid("budgets", policies=("none",)).cells) == 1


@pytest.mark.parametrize("policy", sorted(RATIO_FREE))
def test_their_budget_is_the_same_at_every_ratio(policy):
    made = read_policy(policy).make()
    for reusable in (0, 1, 7, 500):
        segments = [SegmentView("document", "d", 0, reusable, True)]
        budgets = {made.budget(BudgetContext(reusable, ratio, segments, range(reusable))) for ratio in (1e-3, 0.5, 1)}
        assert len(budgets) == 1


def test_combinations_that_the_embedded_engine_computes_alike_run_once():
    found = grid("switches", "embedded")
    assert len(found.cells) == 18
    assert len(found.same) == 6
    assert all(same.name.endswith("stop-at-miss.isolated") for same in found.same)
    assert len(grid("switches", "another").cells) == 24


def test_nothing_written_back_is_one_cell_with_one_policy():
    found = grid("disciplines", "embedded")
    (blank,) = [cell for cell in found.cells if cell.switches.write_back == "none"]
    assert blank.policies == POLICIES[:1]
    assert blank.is_control
    whys = {same.why for same in found.same if same.cell == blank.name}
    assert any("nothing is ever in the cache" in why for why in whys)


def test_what_is_the_same_is_said_only_of_cells_that_run():
    for kind in KINDS:
        found = grid(kind, "embedded", policies=("token-topk", "none"))
        names = {cell.name for cell in found.cells}
        assert {same.cell for same in found.same} <= names


@pytest.mark.parametrize("mask", get_args(Mask))
@pytest.mark.parametrize("write_back", get_args(WriteBack))
def test_canonical_switches_are_their_own_and_differ_in_nothing_else(mask, write_back):
    for lookup in ("any", "stop-at-miss"):
        switches = Switches(mask=mask, write_back=write_back, lookup=lookup, check_layer=3, capacity_bytes=5)
        stands_for, why = canonical("embedded", switches)
        assert canonical("embedded", stands_for)[0] == stands_for
        assert (stands_for.check_layer, stands_for.capacity_bytes, stands_for.write_back) == (3, 5, write_back)
        assert (stands_for == switches) or why
    assert canonical("another", switches) == (switches, "")
    assert not leaves_no_choice("another", replace(switches, write_back="none"))


@pytest.mark.parametrize("gap", ["recompute", "store"])
def test_what_is_only_likely_to_be_the_same_runs(gap):
    """An evicted chunk is missed in its own context too, and what follows it may still be there."""
    switches = Switches(mask="exact", gap=gap, write_back="versioned", lookup="stop-at-miss")
    assert canonical("embedded", switches) == (switches, "")


def test_nothing_to_study_is_refused():
    with pytest.raises(UsageError, match="no policy is left"):
        grid("budgets", policies=())
    with pytest.raises(UsageError, match=r"no cell here: lookup 'vllm-prefix'"):
        grid("budgets", lookup="vllm-prefix")


def test_every_name_that_the_grid_knows_is_there():
    assert available("policies").keys() >= RATIO_FREE | COSTLY
    assert set(AXES[1:]) <= set(Switches.__dataclass_fields__)
