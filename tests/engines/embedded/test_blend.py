"""The engine held against the slow reference: logits, mixed cache, deviations, selections, store and ledger."""

from __future__ import annotations

import random
from itertools import product
from typing import get_args

import pytest
from blend_cases import (
    TOKEN_BYTES,
    Pair,
    every_switch,
    histories,
    policy_named,
    prompt_of,
    words_drawn,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILY_SETTINGS

from kvaudit.engines import Gap, Lookup, Mask, Switches, WriteBack
from kvaudit.plugins import BUILT_IN

POLICIES = [*BUILT_IN["policies"], "every"]


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
@pytest.mark.parametrize(
    ("mask", "gap", "lookup", "write_back"),
    list(product(get_args(Mask), get_args(Gap), get_args(Lookup), get_args(WriteBack))),
)
def test_every_combination_over_a_random_history(
    mask: Mask, gap: Gap, lookup: Lookup, write_back: WriteBack, family: str
) -> None:
    drawn = random.Random(f"{mask} {gap} {lookup} {write_back} {family}")
    switches = Switches(
        mask,
        gap,
        lookup,
        write_back,
        suffix=drawn.choice(["after", "with-rows"]),
        deviation=drawn.choice(["key", "value"]),
        check_layer=drawn.randrange(3),
        capacity_bytes=drawn.choice([None, None, 12 * TOKEN_BYTES, 20 * TOKEN_BYTES]),
    )
    pair = Pair(switches, drawn.choice([0.15, 0.4]), family)
    for number, words in enumerate(words_drawn(drawn, 3)):
        pair.serve(f"r{number}", prompt_of(words), policy_named(drawn.choice(POLICIES)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    switches=every_switch,
    history=histories,
    policy=st.sampled_from(POLICIES),
    ratio=st.sampled_from([0.05, 0.3, 0.7, 1.0]),
    family=st.sampled_from(list(FAMILY_SETTINGS)),
)
def test_any_history(switches: Switches, history: list, policy: str, ratio: float, family: str) -> None:
    pair = Pair(switches, ratio, family)
    for number, (words, part) in enumerate(history):
        pair.serve(f"r{number}", prompt_of(words), policy_named(policy), part)
