from dataclasses import replace

import pytest

from kvaudit.engines import EngineSettings, Switches
from kvaudit.errors import UsageError
from kvaudit.plan import make_plan
from kvaudit.policies.bounds import RecomputeAll, ReuseAll
from kvaudit.policy_specs.sources import source_digest

SETTINGS = EngineSettings()


def plan(*, engine="scripted", settings=SETTINGS, policies=("none", "all"), orders=3):
    return make_plan(8, engine, settings, policies, orders)


def test_arms_run_full_prefill_first_then_each_policy_with_its_controls():
    assert [arm.arm_id for arm in plan().arms] == [
        "full-prefill.chronological",
        "full-prefill.chronological.repeat",
        "none.chronological",
        "none.reversed",
        "none.shuffle-1",
        "none.chronological.reset",
        "none.chronological.repeat",
        "all.chronological",
        "all.reversed",
        "all.shuffle-1",
        "all.chronological.reset",
        "all.chronological.repeat",
    ]


def test_a_policy_that_ranks_by_signals_has_rounding_controls_of_its_first_two_orders():
    arms = plan(policies=("token-topk", "legolink")).arms
    assert [arm.arm_id for arm in arms if arm.control == "rounding"] == [
        "token-topk.chronological.rounding",
        "token-topk.reversed.rounding",
    ]


def test_the_other_controls_keep_the_chronological_order():
    controls = [arm for arm in plan().arms if arm.control in ("reset", "repeat")]
    assert {arm.order.permutation for arm in controls} == {tuple(range(8))}


def test_default_policies_are_token_topk_and_document_aligned():
    assert plan(policies=()).policies == ("token-topk", "document-aligned")


def test_a_policy_that_is_named_twice_runs_once():
    assert plan(policies=("none", "all", "none")).policies == ("none", "all")


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0001, float("nan"), float("inf")])
def test_an_impossible_ratio_is_refused(ratio):
    with pytest.raises(UsageError, match=f"the recompute ratio is {ratio}"):
        plan(settings=replace(SETTINGS, recompute_ratio=ratio))


@pytest.mark.parametrize("ratio", [1e-9, 0.15, 1.0])
def test_a_share_is_a_ratio(ratio):
    assert plan(settings=replace(SETTINGS, recompute_ratio=ratio)).settings.recompute_ratio == ratio


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "gpt"}, "unknown engine 'gpt'"),
        ({"policies": ("none", "luck")}, "unknown policy 'luck'"),
        ({"policies": ("full-prefill",)}, "'full-prefill' is what every policy is compared with"),
        ({"orders": 1}, "1 order cannot show answer variation"),
        ({"settings": replace(SETTINGS, seed=-1)}, "the seed is -1"),
        ({"settings": replace(SETTINGS, switches=Switches(check_layer=-1))}, "the check layer is -1"),
        ({"settings": replace(SETTINGS, switches=Switches(capacity_bytes=0))}, "the cache capacity is 0 bytes"),
    ],
)
def test_what_cannot_work_is_refused_before_any_engine_opens(change, message):
    with pytest.raises(UsageError, match=message):
        plan(**change)


def test_the_data_of_a_plan_holds_every_setting():
    data = plan(settings=replace(SETTINGS, recompute_ratio=0.05, options={"fault": "none"})).as_data()
    assert data["recompute_ratio"] == 0.05
    assert data["options"] == {"fault": "none"}
    assert data["switches"]["mask"] == "bottom-right"
    assert (data["engine"], data["policies"], data["orders"], data["seed"]) == ("scripted", ["none", "all"], 3, 0)
    assert data["policy_sources"] == {"none": source_digest(ReuseAll), "all": source_digest(RecomputeAll)}


def test_parameters_make_policies_of_their_own():
    made = plan(policies=("token-runs:m=8", "token-runs", "token-runs:m=08"))
    assert made.policies == ("token-runs:m=8", "token-runs")
    assert len(made.arms) == 2 + 2 * 7
    assert {arm.policy for arm in made.arms} == {"full-prefill", "token-runs:m=8", "token-runs"}
    assert made.spec("token-runs:m=8").make().m == 8


def test_a_black_box_is_asked_in_every_order_twice_with_all_other_orders_between():
    """What happens at a server beside the audit and lasts as long as an arm falls on an order or on its repeat."""
    arms = [arm for arm in make_plan(4, "server", EngineSettings(), (), 3).arms if arm.policy == "as-served"]
    places = {(arm.order.name, arm.control): place for place, arm in enumerate(arms)}
    orders = ("chronological", "reversed", "shuffle-1")
    assert list(places) == [
        *((order, "none") for order in orders),
        ("chronological", "reset"),
        *((order, "repeat") for order in orders),
    ]
    assert {places[order, "repeat"] - places[order, "none"] for order in orders} == {4}
