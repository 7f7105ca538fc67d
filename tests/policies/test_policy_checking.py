"""The contract check: every registered policy passes, and each way of breaking the contract is seen by name."""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from kvaudit.plugins import BUILT_IN
from kvaudit.policies import Policy, checking
from kvaudit.policies.checking import Check, check_policy, checks
from kvaudit.policies.tokens import TokenTopK
from kvaudit.policy_specs import read_policy

NAMES = [
    "declaration",
    "budget",
    "schedule",
    "exactly k distinct reusable positions",
    "extreme shapes",
    "long prompts",
    "the same again under the same seed",
    "no state between requests",
    "the context is left as it was",
    "asks only for what it declares",
    "speed",
]
EXACTLY_K, EXTREME, LONG, AGAIN, STATE, CONTEXT, NEEDS = NAMES[3:10]


@pytest.mark.parametrize("name", BUILT_IN["policies"])
def test_every_registered_policy_keeps_the_contract(name):
    found = check_policy(read_policy(name).make)
    assert [check.name for check in found] == NAMES
    assert [check for check in found if not check.passed] == []
    assert [check for check in found if check.warning and check.name != "speed"] == []


class First(Policy):
    """Keeps the contract; what derives from it breaks one thing."""

    name = "first"
    needs = frozenset()

    def select(self, context):
        return context.positions[: context.k]


def failures(policy, **options) -> dict[str, str]:
    return {check.name: check.detail for check in check_policy(policy, **options) if not check.passed}


def found(policy, name) -> Check:
    return next(check for check in checks(policy) if check.name == name)


def test_what_keeps_the_contract_passes():
    assert failures(First) == {}


class Short(First):
    def select(self, context):
        return context.positions[: max(0, context.k - 1)]


class Twice(First):
    def select(self, context):
        return np.append(context.positions[: context.k - 1], context.positions[:1])[: context.k]


class NotReusable(First):
    def select(self, context):
        return np.arange(context.k)


class Numbers(First):
    def select(self, context):
        return context.positions[: context.k] + 0.5


@pytest.mark.parametrize(
    ("policy", "detail"),
    [
        (Short, '"t1", k = 1: returned 0 positions, not k = 1; it was []'),
        (Twice, '"d2", k = 2: returned a position twice; it was [0, 0]'),
        (NotReusable, '"g3- i2", k = 1: returned a position that is not reusable; it was [0]'),
        (Numbers, '"t1", k = 1: returned float64 of shape (1,), not positions; it was [0.5]'),
    ],
)
def test_a_broken_selection_is_shown_with_the_smallest_request(policy, detail):
    found = failures(policy)
    assert set(found) >= {EXACTLY_K, EXTREME}
    layout = detail.partition('"')[2].partition('"')[0]
    assert len(layout.split()) <= 2
    assert found[EXACTLY_K].partition(": ")[2] == detail.partition(": ")[2]


class NanBlind(First):
    """Fails only where deviations are not numbers or equal."""

    needs = frozenset({"deviation"})

    def select(self, context):
        if not context.k:
            return context.positions[:0]
        return context.positions[context.deviation >= np.sort(context.deviation)[-context.k]]


class NanOnly(First):
    needs = frozenset({"deviation"})

    def select(self, context):
        return context.positions[~np.isnan(context.deviation)][: context.k]


class OneDocument(First):
    def select(self, context):
        return context.positions[: context.k if len(context.segments) > 1 or context.k < 5 else 4]


@pytest.mark.parametrize(
    ("policy", "shape"), [(NanBlind, "no deviation"), (NanOnly, "not a number"), (OneDocument, "one document")]
)
def test_an_extreme_shape_is_named(policy, shape):
    assert f"({shape})" in failures(policy)[EXTREME]


class ShortWhereLong(First):
    def select(self, context):
        return context.positions[: context.k - (len(context.positions) > 500)]


class Wrapping(First):
    """Keeps positions in a byte."""

    def select(self, context):
        return context.positions[: context.k].astype(np.uint8)


@pytest.mark.parametrize(
    ("policy", "detail"),
    [(ShortWhereLong, "returned 375 positions, not k = 376; it was [0, 1"), (Wrapping, "returned a position twice")],
)
def test_a_selection_that_is_broken_for_long_prompts_alone_is_seen(policy, detail):
    seen = failures(policy)
    assert set(seen) == {LONG}
    assert "k = 376 (the prompt of 84 documents): " in seen[LONG]
    assert detail in seen[LONG]
    assert found(First, LONG).detail == "3 requests of 7,536 reusable tokens"


class Luck(First):
    def select(self, context):
        return np.random.permutation(context.positions)[: context.k]


class OldLuck(First):
    def select(self, context):
        return np.array(random.sample(context.positions.tolist(), context.k), dtype=np.int64)


class Seeded(First):
    def select(self, context):
        return context.rng.permutation(context.positions)[: context.k]


@pytest.mark.parametrize("policy", [Luck, OldLuck])
def test_randomness_of_its_own_is_seen(policy):
    assert "with the same seed" in failures(policy)[AGAIN]


def test_the_contexts_generator_is_allowed():
    assert failures(Seeded) == {}


class Counting(First):
    def __init__(self):
        self.served = 0

    def select(self, context):
        self.served += 1
        return np.roll(context.positions, self.served)[: context.k]


class Remembering(First):
    """Keeps the first answer of each length on the class."""

    kept: ClassVar[dict] = {}

    def select(self, context):
        start = self.kept.setdefault(len(context.positions), context.k) % 2
        return np.roll(context.positions, -start)[: context.k]


def test_state_of_an_instance_is_seen():
    seen = failures(Counting)
    assert set(seen) == {STATE}
    assert " alone, and " in seen[STATE]
    assert "after 1 other requests" in seen[STATE]


def test_state_of_a_class_is_seen():
    Remembering.kept.clear()
    assert failures(Remembering) == {
        STATE: "Remembering.kept changed while it was asked: an arm would see what another left"
    }


def test_state_of_a_module_is_seen(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from kvaudit.policies import Policy\nTABLE = {}\nclass Mine(Policy):\n    name, needs = 'mine', frozenset()\n"
        "    def select(self, context):\n        TABLE[context.k] = 1\n        return context.positions[: context.k]\n"
    )
    seen = failures(read_policy(f"{tmp_path}/mine.py:Mine").make)
    assert seen == {STATE: "TABLE changed while it was asked: an arm would see what another left"}


class Writing(First):
    needs = frozenset({"deviation"})

    def select(self, context):
        deviation = context.deviation
        deviation[np.isnan(deviation)] = 0
        return context.positions[np.argsort(-deviation, kind="stable")[: context.k]]


class Moving(First):
    def select(self, context):
        context.positions[0] += 0 if len(context.positions) < 3 else 1
        return np.arange(0)


def test_writing_into_the_context_is_seen():
    assert set(failures(Writing)) == {CONTEXT}
    assert failures(Writing)[CONTEXT].endswith("wrote into the key deviation that it was given")
    assert failures(Moving)[CONTEXT].endswith("wrote into the positions that it was given")


class Undeclared(First):
    def select(self, context):
        return context.positions[np.argsort(context.query_attention()[0], kind="stable")[: context.k]]


class UndeclaredSignals(First):
    """Goes around the context's properties, which would refuse it."""

    needs = frozenset({"deviation"})

    def select(self, context):
        weights = context.signals.query_attention(context.layer)[0] + context.signals.deviation()
        return context.positions[np.argsort(weights, kind="stable")[: context.k]]


class Idle(First):
    needs = frozenset({"value-deviation", "output-kl"})


def test_needs_are_held_against_what_is_asked_for():
    seen = failures(Undeclared)
    assert set(seen) == {NEEDS}
    assert "asked for query-attention, and declares nothing" in seen[NEEDS]
    around = failures(UndeclaredSignals)
    assert set(around) == {NEEDS}
    assert around[NEEDS].endswith(": asked `signals` for query-attention, and declares deviation")
    idle = found(Idle, NEEDS)
    assert idle.passed
    assert idle.warning == "declares output-kl, value-deviation and asked for none of it"
    assert found(TokenTopK, NEEDS) == Check(NEEDS, True, "asked for deviation")


class Greedy(First):
    def budget(self, request):
        return request.reusable + 1


class Fickle(First):
    def __init__(self):
        self.asked = 0

    def budget(self, request):
        self.asked += 1
        return min(request.reusable, self.asked)


class Half(First):
    def budget(self, request):
        return request.reusable // 2


def test_budgets_are_checked():
    assert failures(Greedy)["budget"].startswith("policy 'first' returned budget 1 for 0 reusable tokens")
    assert "tokens, and" in failures(Fickle)["budget"]
    assert failures(Half) == {}
    assert found(First, "budget").detail.endswith("by the ratio")
    assert not found(Half, "budget").detail.endswith("by the ratio")


class Spending(First):
    def schedule(self, k, reusable, layers):
        return [k + 1] * layers


class Narrowing(First):
    """Twice k at the first layer and none at the last, where that is possible."""

    def schedule(self, k, reusable, layers):
        if layers < 2 or 2 * k > reusable:
            return [k] * layers
        return [2 * k, *[k] * (layers - 2), 0]


class NarrowingShort(Narrowing):
    """One too few where two thirds are gone already."""

    def select(self, context):
        return context.positions[: context.k - (context.layer == 2 and context.k > 1)]


class UndeclaredAtLaterLayers(Narrowing):
    def select(self, context):
        if context.layer > 1:
            context.signals.value_deviation(context.layer)
        return context.positions[: context.k]


def test_schedules_are_checked_layer_by_layer():
    assert "its schedule sums to 1, not to 0" in failures(Spending)["schedule"]
    assert failures(Narrowing) == {}
    assert "on average" in found(Narrowing, "schedule").detail
    assert "returned 1 positions, not k = 2" in failures(NarrowingShort)[EXACTLY_K]
    later = failures(UndeclaredAtLaterLayers)
    assert later[NEEDS].endswith(": asked `signals` for value-deviation, and declares nothing")


class Early(First):
    start = "first-layer"
    needs = frozenset({"deviation"})


class Unknown(First):
    needs = frozenset({"luck"})


class Nowhere(First):
    start = "last-layer"


@pytest.mark.parametrize(
    ("policy", "detail"),
    [
        (Early, "starts at the first layer, where nothing is computed yet, and needs deviation"),
        (Unknown, "needs 'luck', which no engine has"),
        (Nowhere, "starts at 'last-layer': check-layer or first-layer"),
    ],
)
def test_declarations_are_checked(policy, detail):
    assert failures(policy)["declaration"].startswith(detail)


class Crashing(First):
    def select(self, context):
        if len(context.positions) > 1:
            return [][3]  # the line that is told
        return context.positions[: context.k]


class Leaving(First):
    def select(self, context):
        sys.exit(0)


class Refusing(First):
    def __init__(self):
        raise OSError("no table")


def test_what_a_policy_raises_is_told_with_its_line():
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if "the line that is told" in text)
    assert failures(Crashing)[EXACTLY_K].endswith(f"IndexError: list index out of range (line {line})")
    assert "SystemExit: 0" in failures(Leaving)[EXACTLY_K]
    assert failures(Refusing)["declaration"].startswith("OSError: no table")


class Hanging(First):
    over: ClassVar[threading.Event] = threading.Event()

    def select(self, context):
        while len(context.positions) > 3 and not self.over.is_set():
            time.sleep(0.01)  # where it hangs
        return context.positions[: context.k]


class HangingWhenMade(First):
    def __init__(self):
        Hanging.over.wait()


@pytest.fixture
def released():
    Hanging.over.clear()
    yield
    Hanging.over.set()


def test_a_policy_that_hangs_fails_with_where_it_does_and_nothing_waits_for_it(released):
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if "# where it hangs" in text)
    start = time.monotonic()
    found = check_policy(Hanging, seconds=0.5)
    assert time.monotonic() - start < 10
    assert [check.name for check in found] == NAMES[:4], "what follows is left out"
    assert [check.passed for check in found] == [True, True, True, False]
    assert found[-1].detail.endswith(f": still at it after 0.5 seconds (line {line})")
    assert found[-1].detail.startswith('"')


def test_a_constructor_that_hangs_fails(released):
    (found,) = check_policy(HangingWhenMade, seconds=0.2)
    assert (found.name, found.passed, found.detail) == ("declaration", False, "still at it after 0.2 seconds")


class Warning_(First):  # noqa: N801
    needs = frozenset({"deviation"})

    def select(self, context):
        np.sqrt(-1 - context.deviation)
        return context.positions[: context.k]


def test_numpys_warnings_are_told_and_do_not_leak():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = found(Warning_, EXTREME)
    assert told.passed
    assert told.warning == "RuntimeWarning: invalid value encountered in sqrt"


class Slow(First):
    def select(self, context):
        time.sleep(0.05 if len(context.positions) > 1000 else 0)
        return context.positions[: context.k]


def test_what_is_slow_gets_a_warning_and_passes():
    slow = found(Slow, "speed")
    assert slow.passed
    assert slow.warning == f"more than {checking.SLOW:g} x token-topk's time, which counts as TTFT"
    assert "ms for 7,536 reusable tokens" in slow.detail
    assert found(TokenTopK, "speed").warning == ""


@dataclass(frozen=True)
class Parametrised(First):
    skip: int = 0

    def select(self, context):
        return context.positions[: max(0, context.k - self.skip)]


def test_the_policy_that_is_checked_is_the_one_that_is_made():
    assert failures(Parametrised) == {}
    assert EXACTLY_K in failures(lambda: Parametrised(skip=1))
