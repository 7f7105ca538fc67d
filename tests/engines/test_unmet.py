"""An engine says which policies it can serve before anything runs."""

from __future__ import annotations

import pytest

from kvaudit.engines import Capabilities, unmet
from kvaudit.engines.vllm.worker.signals import OFFERED
from kvaudit.plugins import available
from kvaudit.policies.rounding import watched
from kvaudit.policy_specs import read_policy

ONCE = Capabilities(policies=True, max_prompt_tokens=None, signals=OFFERED, selects_once=True)


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("token-topk", ""),
        ("document-aligned", ""),
        ("cacheclip", "auxiliary-attention and a selection at the first layer"),
        ("legolink", "a selection at the first layer"),
        ("cacheblend-gradual", "a selection that narrows layer by layer"),
    ],
)
def test_what_an_engine_that_selects_once_lacks(name: str, lacking: str) -> None:
    policy = read_policy(name).make()
    assert unmet(policy, ONCE) == lacking
    assert unmet(watched(policy, follow=False), ONCE) == lacking


def test_an_engine_without_such_limits_serves_every_policy() -> None:
    free = Capabilities(policies=True, max_prompt_tokens=None)
    assert not any(unmet(read_policy(name).make(), free) for name in available("policies"))
