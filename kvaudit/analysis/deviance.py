"""Which switch explains most of what differs between the cells of a study: an analysis of deviance (pure).

A binomial model with a logit link (McCullagh and Nelder 1989, Generalized Linear Models, 2.3 and 4.4) of how often
an event (an answer that equals full prefill's, or a pair of orders that disagree) is seen in each cell, on the
switches as factors. A switch's share is by how much the deviance rises when it is taken out of the model of all main
effects, over the deviance between cells.

The same requests are in every cell, so that cells are not independent, and no chi-square distribution is claimed for
a deviance. What is claimed rests on blocks of requests, which are: intervals come from resampling blocks with all their
cells, p-values from exchanging a switch's values within each block, all else equal, which is what chance would do if
the switch had no effect. Shares do not depend on how much a block weighs, and neither do these. Cells that are copies
of others give a block no more weight than it has.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from kvaudit.analysis import stats
from kvaudit.analysis.exchange import exchanged
from kvaudit.analysis.stats import Flags, Floats, Integers

RESAMPLES = 200
PERMUTATIONS = 9_999
FEWEST_BLOCKS = 6
"""Fewer are not resampled: 5 have 126 different resamples, 3 of which would be the end of a 95 % interval."""
SURE = 0.975
"""The share of resamples in which a switch must explain most before that is said of it: of two switches that explain
as much, each is the larger one by luck in 2.5 %."""
ITERATIONS, QUICK_ITERATIONS = 100, 10
"""Of a fit to the cells, and to a resample. Where a switch separates answers, each step leaves 1/e of what is left."""
_TIE = 1e-9
_NOTHING = 1e-6
"""A deviance below this is rounding."""


@dataclass(frozen=True, slots=True)
class Responses:
    """C cells, R requests in the order of the stream.

    factors: by switch, each cell's value, [C].
    events: how many of `trials` showed the event, int64 [C, R]; trials are 0 where nothing could be compared.
    """

    factors: Mapping[str, Sequence[str]]
    events: Integers
    trials: Integers


@dataclass(frozen=True, slots=True)
class Level:
    """A switch's value and the share of events under it, over the cells that exist under every value of the switch."""

    value: str
    share: float


@dataclass(frozen=True, slots=True)
class Term:
    """A switch, or two of them, `a:b`, as an interaction.

    sequential: the deviance that it takes away when terms enter in the order of the table.
    marginal: the deviance that comes back when it alone is taken out, of all main effects or, for an interaction, of
    all main effects and two-way interactions. share: the marginal over the deviance between cells, with a 95 %
    interval; largest: in which share of resamples it had more than any other switch. Both None for interactions, and
    of fewer blocks than `FEWEST_BLOCKS`. A resample in which cells do not differ, or one has nothing to compare, counts
    for no switch and leaves shares open: it is 0 to the lower bound and 1 to the upper one.
    smallest_p: the smallest p-value that so many blocks and permutations can give, adjusted as if it were the first of
    all switches.
    """

    name: str
    df: int
    sequential: float
    marginal: float
    share: float
    share_low: float | None = None
    share_high: float | None = None
    largest: float | None = None
    levels: tuple[Level, ...] = ()
    smallest_p: float | None = None
    p_value: float | None = None
    p_adjusted: float | None = None

    @property
    def is_interaction(self) -> bool:
        return ":" in self.name


@dataclass(frozen=True, slots=True)
class Deviance:
    """null: the deviance between cells. main: what is left of it after all main effects; two_way: after all two-way
    interactions too. `explaining`: the switch of which it can be said that it explains most, else None. `cannot`: why
    nothing was estimated, None where it was. `blocks` independent blocks of requests."""

    cells: int
    blocks: int
    null: float
    main: float
    two_way: float
    terms: tuple[Term, ...]
    explaining: str | None
    cannot: str | None = None

    @property
    def switches(self) -> tuple[Term, ...]:
        """The main effects, the largest share first."""
        return tuple(sorted((term for term in self.terms if not term.is_interaction), key=lambda term: -term.marginal))

    @property
    def interactions(self) -> tuple[Term, ...]:
        return tuple(sorted((term for term in self.terms if term.is_interaction), key=lambda term: -term.marginal))


def deviance(responses: Responses, block: int, seed: int) -> Deviance:
    """The analysis of one policy's events. `block` successive requests count as one (`stats.block_length`)."""
    responses = _counted(responses)
    cells, requests = responses.events.shape
    events, trials = _in_blocks(responses.events, block), _in_blocks(responses.trials, block)
    blocks = events.shape[1]
    model = _Model.of(responses.factors, cells)
    cannot = _refusal(model, cells, requests, events, trials)
    if cannot is not None:
        return Deviance(cells, blocks, 0.0, 0.0, 0.0, (), None, cannot)
    table = events.sum(axis=1), trials.sum(axis=1)
    null = model.left((), *table)
    if null < _NOTHING:
        return Deviance(cells, blocks, 0.0, 0.0, 0.0, (), None, "every cell shows the same share")
    main, two_way = model.left(model.main, *table), model.left(model.all, *table)
    sequence = [model.left(model.all[:count], *table) for count in range(len(model.all) + 1)]
    terms = []
    for number, name in enumerate(model.all):
        among, whole = (model.main, main) if name in model.main else (model.all, two_way)
        marginal = max(0.0, model.left(_without(among, name), *table) - whole)
        sequential = max(0.0, sequence[number] - sequence[number + 1])
        terms.append(Term(name, model.df(name), sequential, marginal, marginal / null))
    found = _tested(_resampled(terms, model, events, trials, seed), responses.factors, events, trials, seed)
    return Deviance(cells, blocks, null, main, two_way, tuple(found), _explaining(found, main))


@dataclass(frozen=True, slots=True)
class _Model:
    """Dummy columns by term; a term whose columns add nothing to those before it (a combination that has no cell) has
    none. `left` is the deviance that a model of some terms leaves."""

    columns: Mapping[str, Floats]
    main: tuple[str, ...]
    cells: int

    @classmethod
    def of(cls, factors: Mapping[str, Sequence[str]], cells: int) -> _Model:
        dummies = {name: _dummies(values) for name, values in factors.items() if len(set(values)) > 1}
        main = tuple(dummies)
        for a, b in combinations(main, 2):
            products = dummies[a][:, :, None] * dummies[b][:, None, :]
            dummies[f"{a}:{b}"] = products.reshape(cells, -1)
        kept, matrix = {}, np.ones((cells, 1))
        for name, columns in dummies.items():
            before = matrix.shape[1]
            for column in columns.T:
                wider = np.column_stack([matrix, column])
                matrix = wider if np.linalg.matrix_rank(wider) == wider.shape[1] else matrix
            kept[name] = matrix[:, before:]
        return cls({name: columns for name, columns in kept.items() if columns.shape[1]}, main, cells)

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def df(self, name: str) -> int:
        return int(self.columns[name].shape[1])

    def left(self, terms: Sequence[str], events: Integers, trials: Integers, iterations: int = ITERATIONS) -> float:
        from statsmodels.genmod.families import Binomial
        from statsmodels.genmod.generalized_linear_model import GLM

        matrix = np.column_stack([np.ones(self.cells), *(self.columns[name] for name in terms)])
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # A cell in which every answer agrees, or none, has no finite coefficient; its deviance has a limit.
            warnings.simplefilter("ignore")
            fitted = GLM(np.column_stack([events, trials - events]), matrix, family=Binomial()).fit(maxiter=iterations)
        left = float(fitted.deviance)
        return left if left >= _NOTHING else 0.0


def _dummies(values: Sequence[str]) -> Floats:
    levels = list(dict.fromkeys(values))
    return np.array([[float(value == level) for level in levels[1:]] for value in values])


def _without(terms: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(term for term in terms if term != name)


def _counted(responses: Responses) -> Responses:
    """Without cells in which nothing was compared."""
    kept = [cell for cell, trials in enumerate(responses.trials.sum(axis=1)) if trials > 0]
    factors = {name: [values[cell] for cell in kept] for name, values in responses.factors.items()}
    return Responses(factors, responses.events[kept], responses.trials[kept])


def _in_blocks(counts: Integers, block: int) -> Integers:
    """[C, R] counts summed over blocks of neighbouring requests: [C, B]."""
    requests = counts.shape[1]
    starts = np.linspace(0, requests, stats.independent(requests, block) + 1).astype(np.int64)[:-1]
    return np.add.reduceat(counts, starts, axis=1) if requests else counts


def _refusal(model: _Model, cells: int, requests: int, events: Integers, trials: Integers) -> str | None:
    if not requests or not cells:
        return "nothing was compared"
    if not model.main:
        return "no switch differs between the cells in which something was compared"
    if not events.any():
        return "no answer showed it in any cell"
    if (events == trials).all():
        return "every answer showed it in every cell"
    return None


def _resampled(terms: Sequence[Term], model: _Model, events: Integers, trials: Integers, seed: int) -> list[Term]:
    """Main effects with what resamples of blocks say of their shares; as they are where there are too few blocks."""
    if events.shape[1] < FEWEST_BLOCKS:
        return list(terms)
    names = [name for name in model.main if name in model.columns]
    shares = _resampled_shares(names, model, events, trials, seed)
    low = np.quantile(np.nan_to_num(shares, nan=0.0), stats.ALPHA / 2, axis=0)
    high = np.quantile(np.nan_to_num(shares, nan=1.0), 1 - stats.ALPHA / 2, axis=0)
    largest = np.mean(_is_largest(shares), axis=0)
    at = {name: place for place, name in enumerate(names)}
    return [
        replace(
            term,
            share_low=float(low[at[term.name]]),
            share_high=float(high[at[term.name]]),
            largest=float(largest[at[term.name]]),
        )
        if term.name in at
        else term
        for term in terms
    ]


def _resampled_shares(names: Sequence[str], model: _Model, events: Integers, trials: Integers, seed: int) -> Floats:
    """Each switch's share of the deviance between cells in each resample, [resamples, switches]; NaN where cells do not
    differ, or nothing was compared in one of them."""
    blocks, rng = events.shape[1], np.random.default_rng(seed)
    shares = np.full((RESAMPLES, len(names)), np.nan)
    for draw in range(RESAMPLES):
        weights = rng.multinomial(blocks, np.full(blocks, 1 / blocks))
        table = events @ weights, trials @ weights
        if (table[1] == 0).any() or (null := model.left((), *table)) < _NOTHING:
            continue
        main = model.left(names, *table, QUICK_ITERATIONS)
        without = (model.left(_without(names, name), *table, QUICK_ITERATIONS) for name in names)
        shares[draw] = [max(0.0, left - main) / null for left in without]
    return shares


def _is_largest(shares: Floats) -> Flags:
    """Where a switch has more than each of the others: bool, as `shares` [resamples, switches]."""
    if shares.shape[1] < 2:
        return shares > 0
    second = np.sort(shares, axis=1)[:, -2, None]
    return shares > second + _TIE


def _tested(
    terms: Sequence[Term], factors: Mapping[str, Sequence[str]], events: Integers, trials: Integers, seed: int
) -> list[Term]:
    """Main effects with the share of events under each value and a permutation p-value, Holm over the switches."""
    found = []
    for term in terms:
        if term.is_interaction:
            found.append(term)
            continue
        levels, by_level = _matched(term.name, factors, events, trials)
        happened, of = by_level.sum(axis=2) if len(levels) > 1 else np.zeros((2, 0))
        shown = tuple(Level(level, float(a / b)) for level, a, b in zip(levels, happened, of, strict=False) if b)
        tested = exchanged(by_level[0], by_level[1], PERMUTATIONS, seed) if len(levels) > 1 else None
        p, smallest = tested or (None, None)
        found.append(replace(term, levels=shown, p_value=p, smallest_p=smallest))
    family = [number for number, term in enumerate(found) if term.p_value is not None]
    adjusted = stats.holm([found[number].p_value or 0.0 for number in family])
    for number, p in zip(family, adjusted, strict=True):
        smallest = min(1.0, len(family) * (found[number].smallest_p or 0.0))
        found[number] = replace(found[number], p_adjusted=p, smallest_p=smallest)
    return found


def _matched(
    name: str, factors: Mapping[str, Sequence[str]], events: Integers, trials: Integers
) -> tuple[list[str], Integers]:
    """A switch's values, and events and trials under each, int64 [2, values, B], over the settings of all other
    switches for which every value has a cell."""
    levels = list(dict.fromkeys(factors[name]))
    others = [values for other, values in factors.items() if other != name]
    settings: dict[tuple[str, ...], dict[str, int]] = {}
    for cell, level in enumerate(factors[name]):
        settings.setdefault(tuple(values[cell] for values in others), {})[level] = cell
    complete = [cells for cells in settings.values() if len(cells) == len(levels)]
    if not complete:
        return [], np.zeros((2, 0, events.shape[1]), np.int64)
    places = np.array([[cells[level] for level in levels] for cells in complete])
    return levels, np.stack([events[places].sum(axis=0), trials[places].sum(axis=0)])


def _explaining(terms: Sequence[Term], interactions: float) -> str | None:
    """The switch that explains most: its effect is no chance, it is the largest in nearly all resamples, and all
    `interactions`, the deviance that main effects leave, take no more. Noise adds to those, and makes this careful."""
    main = [term for term in terms if not term.is_interaction]
    most = max(main, key=lambda term: term.marginal, default=None)
    if most is None or most.largest is None or most.p_adjusted is None:
        return None
    sure = most.largest >= SURE and most.p_adjusted <= stats.ALPHA and most.marginal >= interactions
    return most.name if sure else None
