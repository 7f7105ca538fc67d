"""The slow reference itself, held against transformers, before it is held against the engine."""

from __future__ import annotations

import random

import pytest
import torch
from slow_reference import SlowEngine
from tiny_models import FAMILY_SETTINGS, ROTARY, VOCABULARY, tiny_model

from kvaudit.engines import Switches
from kvaudit.records import Prompt, PromptSegment


def drawn_prompt(length: int) -> Prompt:
    ids = tuple(random.Random(length).choices(range(VOCABULARY), k=length))
    return Prompt(ids, (PromptSegment("document", "d", 0, length),))


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
@pytest.mark.parametrize("rope", ROTARY)
def test_full_prefill_is_transformers_own(family: str, rope: str) -> None:
    model, prompt = tiny_model(family, 3, rope), drawn_prompt(23)
    result = SlowEngine(model, Switches(), 0.5).serve("r", prompt, None)
    expected = model(torch.tensor([prompt.token_ids]), use_cache=True)
    torch.testing.assert_close(result.logits.float(), expected.logits[0, -1], rtol=0, atol=1e-4)
    for layer, cached in enumerate(expected.past_key_values.layers):
        torch.testing.assert_close(result.keys[layer].float(), cached.keys[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(result.values[layer].float(), cached.values[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_greedy_answer_is_transformers_own(family: str) -> None:
    model, prompt = tiny_model(family, 4), drawn_prompt(11)
    engine = SlowEngine(model, Switches(), 0.5)
    generated = engine.greedy(prompt, engine.serve("r", prompt, None), 6)
    ids = torch.tensor([prompt.token_ids])
    assert generated == model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)[0, 11:].tolist()
    assert engine.greedy(prompt, engine.serve("r", prompt, None), 6, [generated[2]]) == generated[:3]
