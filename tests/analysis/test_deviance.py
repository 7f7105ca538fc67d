"""The analysis of deviance against the likelihood itself, against planted causes, and where nothing can be told."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit, xlogy
from scipy.stats import binom

from kvaudit.analysis import deviance as module
from kvaudit.analysis.deviance import Responses, deviance

LEVELS = {"mask": ("exact", "bottom-right"), "gap": ("recompute", "zero", "store"), "lookup": ("any", "stop-at-miss")}


@pytest.fixture(autouse=True, scope="module")
def a_few_resamples():
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "RESAMPLES", 40)
    patch.setattr(module, "PERMUTATIONS", 999)
    yield
    patch.undo()


def cells(levels=LEVELS):
    return [dict(zip(levels, values, strict=True)) for values in product(*levels.values())]


def responses(chance, requests=24, trials=5, seed=0, among=None):
    """Events drawn with `chance(cell)` [R] or a number, in every cell of `among`."""
    rng, among = np.random.default_rng(seed), among or cells()
    events = [rng.binomial(trials, np.broadcast_to(chance(cell), requests)) for cell in among]
    factors = {name: [cell[name] for cell in among] for name in among[0]}
    return Responses(factors, np.array(events), np.full((len(among), requests), trials))


def log_likelihood(events, trials, shares):
    return float((xlogy(events, shares) + xlogy(trials - events, 1 - shares)).sum())


def slow_deviance(factors, terms, events, trials):
    """Twice the log-likelihood that is missing to one share a cell, the model's maximised by a general optimiser."""

    def columns(term):
        names = term.split(":")
        levels = [sorted(set(factors[name])) for name in names]
        for chosen in list(product(*levels)):
            yield [
                all(factors[n][cell] == v for n, v in zip(names, chosen, strict=True)) for cell in range(len(events))
            ]

    matrix = np.array([np.ones(len(events)), *(column for term in terms for column in columns(term))], float).T

    def lacking(weights):
        shares = expit(matrix @ weights)
        gradient = matrix.T @ (trials * shares - events)
        return -log_likelihood(events, trials, shares), gradient

    found = minimize(lacking, np.zeros(matrix.shape[1]), jac=True, method="BFGS", options={"gtol": 1e-7})
    return 2 * (log_likelihood(events, trials, events / trials) + found.fun)


def mask_and_gap(cell):
    return expit(1.5 - 2.0 * (cell["mask"] == "bottom-right") - 0.8 * (cell["gap"] == "zero"))


@pytest.fixture(scope="module")
def found():
    return deviance(responses(mask_and_gap), 1, 0)


def test_deviances_are_those_of_the_likelihood(found):
    table = responses(mask_and_gap)
    events, trials = table.events.sum(axis=1), table.trials.sum(axis=1)

    def slow(*terms):
        return slow_deviance(table.factors, terms, events, trials)

    main, two_way = ("mask", "gap", "lookup"), ("mask:gap", "mask:lookup", "gap:lookup")
    assert found.null == pytest.approx(slow(), rel=1e-4)
    assert found.main == pytest.approx(slow(*main), rel=1e-3)
    assert found.two_way == pytest.approx(slow(*main, *two_way), rel=1e-3, abs=1e-3)
    terms = {term.name: term for term in found.terms}
    assert terms["gap"].sequential == pytest.approx(slow("mask") - slow("mask", "gap"), rel=1e-3)
    assert terms["gap"].marginal == pytest.approx(slow("mask", "lookup") - found.main, rel=1e-3)
    without = slow(*main, "mask:lookup", "gap:lookup")
    assert terms["mask:gap"].marginal == pytest.approx(without - found.two_way, rel=1e-2, abs=1e-3)
    assert [terms[name].df for name in (*main, *two_way)] == [1, 2, 1, 2, 1, 2]


def test_a_switch_alone_has_the_closed_form():
    """With one factor the model is one share a value: G squared."""
    events, trials = np.array([[30], [12], [20]]), np.full((3, 1), 40)
    found = deviance(Responses({"gap": list("abc")}, events, trials), 1, 0)
    shares, pooled = events / trials, events.sum() / trials.sum()
    assert found.null == pytest.approx(
        2 * (log_likelihood(events, trials, shares) - log_likelihood(events, trials, pooled))
    )
    assert found.main == pytest.approx(0, abs=1e-9)
    assert found.terms[0].share == pytest.approx(1)


def test_the_sequential_deviances_add_up(found):
    assert sum(term.sequential for term in found.terms) == pytest.approx(found.null - found.two_way)


def test_a_planted_cause_is_found(found):
    assert found.explaining == "mask"
    most = found.switches[0]
    assert most.name == "mask"
    assert most.share > 0.7
    assert most.share_low < most.share < most.share_high + 0.05
    assert most.p_adjusted < 0.01
    levels = {level.value: level.share for level in most.levels}
    assert levels["exact"] - levels["bottom-right"] > 0.3
    nothing = next(term for term in found.terms if term.name == "lookup")
    assert nothing.share < 0.05
    assert nothing.p_value > 0.01


@pytest.mark.parametrize("lost", [0.0, 1.0])
def test_a_switch_that_separates_all_answers_explains_everything(lost):
    found = deviance(responses(lambda cell: lost if cell["mask"] == "exact" else 1 - lost), 1, 0)
    assert found.explaining == "mask"
    assert found.main == pytest.approx(0, abs=1e-6)
    assert found.switches[0].share == pytest.approx(1)
    assert {level.share for level in found.switches[0].levels} == {0.0, 1.0}


def test_a_cell_without_loss_does_not_break_the_others():
    found = deviance(responses(lambda cell: 1.0 if cell["gap"] == "store" else mask_and_gap(cell)), 1, 0)
    assert all(np.isfinite([term.sequential, term.marginal, term.share]).all() for term in found.terms)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (responses(lambda cell: 1.0), "every answer showed it in every cell"),
        (responses(lambda cell: 0.0), "no answer showed it in any cell"),
        (Responses({}, np.zeros((0, 0), int), np.zeros((0, 0), int)), "nothing was compared"),
        (Responses({"mask": ["exact", "exact"]}, np.ones((2, 4), int), np.full((2, 4), 2)), "no switch differs"),
        (Responses({"mask": list("ab")}, np.ones((2, 4), int), np.full((2, 4), 2)), "every cell shows the same share"),
        (Responses({"mask": list("ab")}, np.zeros((2, 4), int), np.zeros((2, 4), int)), "nothing was compared"),
    ],
)
def test_why_nothing_can_be_estimated(table, why):
    found = deviance(table, 1, 0)
    assert why in found.cannot
    assert found.terms == ()
    assert found.explaining is None


def test_a_cell_in_which_nothing_was_compared_is_left_out():
    table = responses(mask_and_gap)
    emptied = Responses(table.factors, table.events.copy(), table.trials.copy())
    emptied.events[3], emptied.trials[3] = 0, 0
    among = [cell for number, cell in enumerate(cells()) if number != 3]
    factors = {name: [cell[name] for cell in among] for name in LEVELS}
    kept = Responses(factors, np.delete(table.events, 3, 0), np.delete(table.trials, 3, 0))
    assert deviance(emptied, 1, 0) == deviance(kept, 1, 0)


def test_a_combination_that_has_no_cell_takes_no_parameter():
    """Chunks computed alone are never missed: there is no stop-at-miss among them."""
    levels = {"lookup": ("any", "stop-at-miss"), "write_back": ("first-writer", "isolated")}
    among = [cell for cell in cells(levels) if tuple(cell.values()) != ("stop-at-miss", "isolated")]
    found = deviance(responses(lambda cell: 0.9 if cell["write_back"] == "isolated" else 0.4, among=among), 1, 0)
    assert [term.name for term in found.terms] == ["lookup", "write_back"]
    assert found.two_way == pytest.approx(0, abs=1e-6)
    lookup = next(term for term in found.terms if term.name == "lookup")
    assert all(0.2 < level.share < 0.6 for level in lookup.levels), "compared where both values have a cell"


def test_an_interaction_that_takes_more_forbids_the_claim():
    """The mask has an effect that is no chance and larger than any other switch's, and that is not the story."""
    chances = {("exact", "any"): 0.95, ("exact", "stop-at-miss"): 0.35, ("bottom-right", "any"): 0.05}

    def crossed(cell):
        return chances.get((cell["mask"], cell["lookup"]), 0.65)

    found = deviance(responses(crossed), 1, 0)
    assert found.interactions[0].name == "mask:lookup"
    assert (found.switches[0].name, found.switches[0].largest) == ("mask", 1)
    assert found.switches[0].p_adjusted < 0.05
    assert found.explaining is None


def test_two_switches_of_one_size_are_not_told_apart():
    rng = np.random.default_rng(0)
    drawn = [rng.binomial(5, expit(1.0 - 1.2 * bad), 24) for bad in range(3)]
    among = cells({"mask": ("exact", "bottom-right"), "lookup": ("any", "stop-at-miss")})
    events = [drawn[(cell["mask"] == "exact") + (cell["lookup"] == "any")] for cell in among]
    factors = {name: [cell[name] for cell in among] for name in ("mask", "lookup")}
    found = deviance(Responses(factors, np.array(events), np.full((4, 24), 5)), 1, 0)
    assert found.switches[0].marginal == pytest.approx(found.switches[1].marginal)
    assert found.switches[0].p_adjusted < 0.01
    assert [term.largest for term in found.switches] == [0, 0]
    assert found.explaining is None


def test_windows_that_overlap_count_as_one():
    """The same answers twelve times over are no more evidence than once."""
    rng = np.random.default_rng(3)
    once = rng.binomial(1, 0.5, (2, 2))
    repeated = np.repeat(once, 12, axis=1)
    factors, trials = {"mask": ["exact", "bottom-right"]}, np.ones((2, 24), int)
    found = deviance(Responses(factors, repeated, trials), 12, 0)
    assert found.blocks == 2
    assert found.terms == () or found.terms[0].p_value >= 0.5


def test_a_switch_without_effect_is_rarely_called_one(monkeypatch):
    """Requests differ, as they do; whether a switch is exchanged within them is luck: p is uniform or above."""
    monkeypatch.setattr(module, "RESAMPLES", 1)
    low = 0
    for seed in range(40):
        base = expit(np.random.default_rng(seed).normal(0, 2, 16))
        table = responses(lambda cell, base=base: base, 16, 3, seed, cells({"mask": ("exact", "bottom-right")}))
        found = deviance(table, 1, seed)
        low += bool(found.terms) and found.terms[0].p_value <= 0.05
    assert low <= binom.ppf(0.999, 40, 0.05)


@given(
    st.lists(st.tuples(*[st.integers(0, 3)] * 6), min_size=1, max_size=6),
    st.integers(1, 3),
)
@settings(max_examples=15, deadline=None)
def test_any_table_gives_finite_numbers_or_a_reason(columns, block):
    among = cells({"mask": ("exact", "bottom-right"), "gap": ("recompute", "zero", "store")})
    factors = {name: [cell[name] for cell in among] for name in ("mask", "gap")}
    events = np.array(columns).T
    found = deviance(Responses(factors, events, np.full(events.shape, 3)), min(block, len(columns)), 0)
    assert found.terms or found.cannot
    for term in found.terms:
        assert 0 <= term.marginal <= found.null + 1e-6
        assert 0 <= term.share <= 1 + 1e-6
        assert term.p_value is None or 0 < term.p_value <= 1
    assert found.two_way <= found.main + 1e-6 <= found.null + 2e-6


def test_interactions_that_take_more_together_forbid_the_claim():
    """Each takes less than the mask does, all of them more."""

    def tangled(cell):
        mask, gap, lookup = (1 if cell[name] == LEVELS[name][0] else -1 for name in LEVELS)
        return expit(0.5 * mask + 0.35 * (mask * gap + mask * lookup + gap * lookup))

    among = cells(dict(LEVELS, gap=("recompute", "zero")))
    found = deviance(responses(tangled, 60, 40, among=among), 1, 0)
    most = found.switches[0]
    assert (most.name, most.largest) == ("mask", 1)
    assert most.p_adjusted < 0.01
    assert found.interactions[0].marginal < most.marginal < found.main - found.two_way
    assert found.explaining is None


def test_what_no_pair_of_switches_explains_forbids_the_claim_too():
    def tangled(cell):
        mask, gap, lookup = (1 if cell[name] == LEVELS[name][0] else -1 for name in LEVELS)
        return expit(0.4 * mask + 0.6 * mask * gap * lookup)

    among = cells(dict(LEVELS, gap=("recompute", "zero")))
    found = deviance(responses(tangled, 60, 40, among=among), 1, 0)
    assert found.switches[0].largest == 1
    assert found.main - found.two_way < found.switches[0].marginal < found.main
    assert found.explaining is None


def damaged_in(damaged, blocks=8):
    """Answers are lost in these blocks of requests alone, wherever the mask is bottom-right."""
    hit = np.isin(np.arange(blocks), damaged)
    return responses(lambda cell: 1.0 - hit * (cell["mask"] == "bottom-right"), blocks, 5)


def test_a_resample_without_loss_is_no_evidence_for_a_switch():
    """A block is in no resample of 8 with a probability of (7/8)^8 = 34 %."""
    most = deviance(damaged_in([3]), 1, 0).switches[0]
    assert most.name == "mask"
    assert most.largest == pytest.approx(1 - (7 / 8) ** 8, abs=0.2)
    assert (most.share_low, most.share_high) == (0, 1), "what a switch's share of no loss is, nobody can say"


def test_a_cell_with_nothing_to_compare_in_a_resample_is_no_evidence_for_a_switch():
    table = responses(mask_and_gap, 8)
    table.trials[3, 1:], table.events[3, 1:] = 0, 0
    table.trials[3, 0], table.events[3, 0] = 5, 3
    most = deviance(table, 1, 0).switches[0]
    assert most.largest <= 1 - (7 / 8) ** 8 + 0.2
    assert most.share_high == 1


@pytest.mark.parametrize("blocks", [2, 5, 6])
def test_a_handful_of_blocks_gives_no_interval_and_names_no_switch(blocks):
    """Of three values, exchanged in four blocks, a p-value would be small enough."""
    levels = {"gap": LEVELS["gap"]}
    found = deviance(responses(lambda cell: float(cell["gap"] != "zero"), blocks, 5, 0, cells(levels)), 1, 0)
    (most,) = found.switches
    assert most.share == pytest.approx(1)
    if blocks < 6:
        assert (most.share_low, most.share_high, most.largest, found.explaining) == (None, None, None, None)
    else:
        assert (most.share_low, most.largest, found.explaining) == (pytest.approx(1, abs=1e-3), 1, "gap")


def test_the_smallest_p_counts_the_blocks_that_can_be_compared():
    among = cells({"mask": LEVELS["mask"]})
    table = responses(lambda cell: float(cell["mask"] == "exact"), 9, 5, 0, among)
    table.trials[1, :3], table.events[1, :3] = 0, 0
    (most,) = deviance(table, 1, 0).switches
    assert most.p_value == most.smallest_p == pytest.approx(2 / 2**6)


def test_the_smallest_p_is_no_smaller_than_drawn_exchanges_can_give():
    among = cells({"mask": LEVELS["mask"]})
    (most,) = deviance(responses(lambda cell: float(cell["mask"] == "exact"), 40, 5, 0, among), 1, 0).switches
    assert most.p_value == most.smallest_p == pytest.approx(1 / (module.PERMUTATIONS + 1))


GRID = dict(LEVELS, gap=("recompute", "zero"), write_back=("first-writer", "isolated"))


def like_a_study(effect, seed, blocks=16):
    """Blocks differ, answers within them are lost by luck and by zeroed gaps; chunks computed alone never miss."""
    rng = np.random.default_rng(seed)
    base, drawn, among = rng.normal(1.5, 1.5, blocks), {}, cells(GRID)
    for cell in among:
        alone = cell["write_back"] == "isolated"
        key = tuple(({**cell, "lookup": "any"} if alone else cell).values())
        drawn.setdefault(key, rng.binomial(5, expit(base - effect * (cell["gap"] == "zero"))))
        cell["events"] = drawn[key]
    factors = {name: [cell[name] for cell in among] for name in GRID}
    events = np.array([cell["events"] for cell in among])
    return Responses(factors, events, np.full(events.shape, 5))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [6, 16])
def test_a_study_in_which_no_switch_matters_blames_one_in_at_most_5_percent(blocks):
    named = [deviance(like_a_study(0.0, seed, blocks), 1, seed).explaining for seed in range(100)]
    assert sum(name is not None for name in named) <= 5


@pytest.mark.slow
def test_a_switch_that_dominates_is_named_in_nearly_every_study_of_16_blocks():
    named = [deviance(like_a_study(1.5, seed), 1, seed).explaining for seed in range(60)]
    assert set(named) <= {"gap", None}
    assert named.count("gap") >= 57


@pytest.mark.parametrize(("blocks", "switches"), [(3, 1), (4, 1), (4, 2), (6, 1), (6, 2)])
def test_so_few_blocks_cannot_tell_however_clear_the_effect(blocks, switches):
    """The smallest p-value is that of a switch which decides every answer."""
    levels = dict(list({"mask": ("exact", "bottom-right"), "lookup": ("any", "stop-at-miss")}.items())[:switches])
    among = cells(levels)
    found = deviance(responses(lambda cell: float(cell["mask"] == "exact"), blocks, 5, 0, among), 1, 0)
    most = found.switches[0]
    assert most.p_adjusted == pytest.approx(most.smallest_p)
    assert most.smallest_p == pytest.approx(switches * 2 / 2**blocks)
    assert (found.explaining == "mask") == (most.smallest_p <= 0.05)


def test_the_seed_decides_the_resamples():
    table = responses(mask_and_gap, requests=8)
    assert deviance(table, 1, 4) == deviance(table, 1, 4)
