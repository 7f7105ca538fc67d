"""Keys that are not moved: loaded as they were turned where they were written, and wrong for that reason alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from blend_cases import TOLERANCE, Pair, engine_of, policy_named, prompt_of, weights_for
from tiny_models import FAMILY_SETTINGS

from kvaudit.engines import PRESETS, WriteBack
from kvaudit.engines.embedded.engine import Prefilled
from kvaudit.engines.embedded.forward import Transformer

UNMOVED = PRESETS["unmoved"]
MOVED = PRESETS["ideal"]
FIRST, SECOND = "i0 d0 d1 q0", "i0 d3 d1 d0 q1"
D1_THEN, D1_NOW, D1_TOKENS = 7, 10, 6


def test_the_preset_is_the_ideal_engine_but_for_the_keys() -> None:
    assert replace(UNMOVED, keys="moved") == MOVED


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_a_loaded_key_is_turned_to_where_it_was_written(family: str) -> None:
    """Turning a key by as many positions as its chunk moved makes it the key that is loaded when keys are moved."""
    got = {name: _second_prefill(family, name) for name in ("moved", "unmoved")}
    at = slice(D1_NOW, D1_NOW + D1_TOKENS)
    moved, unmoved = (got[name].keys[1:, :, at] for name in ("moved", "unmoved"))
    assert not torch.allclose(moved, unmoved, **TOLERANCE)
    shift = Transformer(weights_for(family)).rotation(0, D1_NOW - D1_THEN + 1)[-1:]
    torch.testing.assert_close(shift.of(unmoved), moved, **TOLERANCE)
    torch.testing.assert_close(got["moved"].values[1, :, at], got["unmoved"].values[1, :, at], **TOLERANCE)


def _second_prefill(family: str, keys: str) -> Prefilled:
    engine = engine_of(replace(MOVED, keys=keys), 0.3, family)  # type: ignore[arg-type]
    engine.prefill("r0", "request", prompt_of(FIRST), policy_named("none"))
    return engine.prefill("r1", "request", prompt_of(SECOND), policy_named("none"))


def test_where_no_chunk_has_moved_nothing_differs() -> None:
    logits = []
    for switches in (MOVED, UNMOVED):
        engine = engine_of(switches)
        for number, words in enumerate((FIRST, "i0 d0 d1 d3 q1")):
            got = engine.prefill(f"r{number}", "request", prompt_of(words), policy_named("none"))
        logits.append(got.logits.clone())
    torch.testing.assert_close(*logits, **TOLERANCE)


def test_what_is_recomputed_is_turned_to_where_it_stands() -> None:
    engine, expected = engine_of(UNMOVED), engine_of(UNMOVED)
    engine.prefill("r0", "request", prompt_of(FIRST), policy_named("none"))
    got = engine.prefill("r1", "request", prompt_of(SECOND), policy_named("all"))
    full = expected.prefill("r1", "request", prompt_of(SECOND), None)
    torch.testing.assert_close(got.keys, full.keys, **TOLERANCE)
    torch.testing.assert_close(got.logits, full.logits, **TOLERANCE)


def test_tokens_that_moved_deviate_more() -> None:
    deviation = {name: _second_prefill("llama", name).deviation for name in ("moved", "unmoved")}
    assert deviation["unmoved"].sum() > 1.3 * deviation["moved"].sum()
    at_the_start = slice(0, 3)
    np.testing.assert_allclose(deviation["unmoved"][at_the_start], deviation["moved"][at_the_start], **TOLERANCE)


@pytest.mark.parametrize("write_back", ["first-writer", "last-writer", "isolated", "versioned", "versions"])
@pytest.mark.parametrize("policy", ["every", "legolink"])
@pytest.mark.parametrize("check_layer", [0, 2])
def test_chunks_that_are_written_again_keep_the_turns_of_what_was_loaded(
    write_back: WriteBack, policy: str, check_layer: int
) -> None:
    pair = Pair(replace(UNMOVED, write_back=write_back, check_layer=check_layer))
    for number, words in enumerate((FIRST, SECOND, "d1 i0 s0 d0 q0", FIRST)):
        pair.prefill(f"r{number}", prompt_of(words), policy_named(policy))
