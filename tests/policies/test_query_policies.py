"""Policies that follow the query's attention: they differ in the layers that count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_contexts import context_of, contexts, for_policy

from kvaudit.policies import Policy, SelectionContext, checked_selection
from kvaudit.policies.a3 import A3
from kvaudit.policies.fusionrag import FusionRAG
from kvaudit.policies.prophetkv import ProphetKV

# Two heads, five tokens, three layers. Means over heads: layer 0 [6 1 1 1 1] / 8, layer 1 [1 5 1 1 0] / 8, layer 2
# [0 0 1 2 4] / 8; their sum [7 6 3 4 5] / 8.
ATTENTION = {
    0: np.array([[0.75, 0.25, 0, 0, 0], [0.75, 0, 0.25, 0.25, 0.25]], dtype=np.float32),
    1: np.array([[0.25, 0.25, 0.25, 0.25, 0], [0, 1, 0, 0, 0]], dtype=np.float32),
    2: np.array([[0, 0, 0.25, 0.25, 0], [0, 0, 0, 0.25, 1]], dtype=np.float32),
}


@pytest.mark.parametrize(
    ("policy", "k", "expected"),
    [
        (ProphetKV(), 1, [0]),
        (ProphetKV(), 2, [0, 1]),
        (ProphetKV(), 4, [0, 1, 3, 4]),
        (A3(), 1, [1]),
        # 1 / 8 three times: the lower positions first.
        (A3(), 3, [0, 1, 2]),
        (FusionRAG(), 2, [3, 4]),
        (FusionRAG(), 3, [2, 3, 4]),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_all_layers_the_check_layer_or_the_last(policy: Policy, k: int, expected: list[int]) -> None:
    context = context_of("i2 d3 q2-", [0.0] * 5, k, needs=policy.needs, queries=ATTENTION)
    assert checked_selection(policy, replace(context, layers=3)).tolist() == expected


@pytest.mark.parametrize("policy", [ProphetKV(), A3(), FusionRAG()], ids=lambda policy: policy.name)
@settings(max_examples=100, deadline=None)
@given(context=contexts(st.integers(0, 12).map(lambda eighths: eighths / 8)))
def test_same_as_the_rule_in_loops(policy: Policy, context: SelectionContext) -> None:
    context = for_policy(policy, context)
    layers = {"prophetkv": range(context.layers), "a3": [context.layer], "fusionrag": [context.layers - 1]}
    scores = [0.0] * len(context.positions)
    for layer in layers[policy.name]:
        for head in context.query_attention(layer).tolist():
            scores = [score + attention for score, attention in zip(scores, head, strict=True)]
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    expected = sorted(context.positions[ranked[: context.k]].tolist())
    assert checked_selection(policy, context).tolist() == expected
