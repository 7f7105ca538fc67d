"""The hook against a blender that calls what LMCBlender calls; the real one is in `vllm_real`."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from worker_jobs import job_of

from kvaudit.engines.vllm.worker.blending import BlendHook, Pass, ratio_for_k
from kvaudit.engines.vllm.worker.session import Observed
from kvaudit.policies import Policy
from kvaudit.policies.bounds import RecomputeAll, ReuseAll
from kvaudit.policies.cacheblend_gradual import CacheBlendGradual
from kvaudit.policies.legolink import LegoLink
from kvaudit.policies.rounding import watched
from kvaudit.policies.tokens import TokenTopK

TOKENS, LAYERS, WIDTH = 10, 4, 6
RATIOS = [0.3]


class Chooser(Policy):
    name = "chooser"

    def __init__(self, select):
        self._select = select

    def select(self, context):
        return self._select(context)


class Blender:
    """Keys of layer l are l + 1 times the fresh ones when they were loaded, apart by position."""

    num_layers = LAYERS

    def __init__(self, hook):
        self.common_metadata = SimpleNamespace(check_layers=[1], recomp_ratios=RATIOS)
        self.metadata = SimpleNamespace(clean=lambda: self.cleaned.append(True))
        self.gpu_connector = SimpleNamespace(get_kv=lambda layer: (self.loaded, self.loaded))
        self.hook, self.cleaned, self.layers, self.selected = hook, [], [], None
        made = torch.Generator().manual_seed(0)
        self.fresh, self.loaded = (torch.randn(TOKENS, WIDTH, generator=made) for _ in range(2))
        self.deviation = (self.fresh - self.loaded).square().sum(1)

    def process_qkv(self, q, k, v, residual, layer_id, attn_output):
        self.layers.append(layer_id)
        if layer_id in self.common_metadata.check_layers:
            k_of_lmcache = max(1, int(len(k) * self.common_metadata.recomp_ratios[0]))
            picked = self.hook.topk(self.deviation, k=k_of_lmcache).indices
            assert len(picked) == k_of_lmcache, "LMCBlender cuts its buffers to its own k"
            self.selected = picked.sort().values
        return q, k, v, residual, attn_output, None

    def compute_layer(self, input_ids):
        process = self.hook._process_qkv(type(self).process_qkv)
        for layer in range(LAYERS):
            process(self, self.fresh, self.fresh, self.fresh, None, layer, None)
            yield

    def blend(self, tokens):
        model = SimpleNamespace(num_layers=LAYERS)
        running = self.hook._compute_layer(lambda model, ids: self.compute_layer(ids))(model, tokens)
        for _ in range(LAYERS):
            next(running)


def blended(policy=None, ratio=0.25, **job):
    seen = Observed(job_of(("document", tuple(range(TOKENS))), policy=policy, ratio=ratio, **job))
    hook = BlendHook(SimpleNamespace(serving=seen))
    blender = Blender(hook)
    hook._blend(Blender.blend)(blender, torch.arange(TOKENS))
    assert blender.common_metadata.recomp_ratios is RATIOS
    assert blender.cleaned == [True]
    return seen, blender


def test_lmcaches_own_selection_is_left_as_it_is_and_seen():
    seen, blender = blended(ratio=0.3)
    largest = blender.deviation.topk(3).indices.sort().values.tolist()
    assert blender.selected.tolist() == largest
    assert (seen.blended.k, seen.blended.layer, seen.blended.tokens) == (3, 1, TOKENS)
    assert seen.blended.selected.tolist() == largest
    assert seen.blended.deviation.tolist() == blender.deviation.tolist()


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.25, 0.3, 0.5, 0.99, 1.0])
def test_a_policy_selects_its_own_number_in_place_of_lmcaches(ratio):
    seen, blender = blended(TokenTopK(), ratio)
    k = max(1, int(ratio * TOKENS))
    assert blender.selected.tolist() == blender.deviation.topk(k).indices.sort().values.tolist()
    assert seen.failure is None
    assert seen.blended.k == k


def test_the_budget_is_what_was_asked_for_whatever_was_selected():
    seen, _ = blended(ratio=0.5)
    assert (seen.blended.k, len(seen.blended.selected)) == (5, 3)


def test_every_k_of_every_number_of_tokens_comes_out_of_lmcaches_arithmetic():
    class Exactly(TokenTopK):
        def budget(self, request):
            return k

    metadata = SimpleNamespace(recomp_ratios=RATIOS)
    for tokens in (1, 7, 49, 121):
        for k in range(1, tokens + 1):
            now = Pass(Observed(job_of(("document", tuple(range(tokens))), policy=Exactly())), LAYERS)
            with ratio_for_k(SimpleNamespace(common_metadata=metadata), now, tokens):
                assert max(1, int(tokens * metadata.recomp_ratios[0])) == k


def test_all_tokens_can_be_recomputed():
    assert blended(RecomputeAll())[1].selected.tolist() == list(range(TOKENS))


def test_nothing_can_be_recomputed_and_then_nothing_is_computed():
    seen, blender = blended(ReuseAll())
    assert seen.blended.k == 0
    assert seen.blended.selected.tolist() == []
    assert len(seen.blended.deviation) == TOKENS
    assert blender.layers == [0, 1]
    assert seen.failure is None


def test_what_a_policy_sees():
    contexts = []

    def select(context):
        contexts.append((context, context.deviation.tolist()))
        return context.positions[: context.k]

    _, blender = blended(Chooser(select), 0.5)
    context, deviation = contexts[0]
    assert (context.k, context.layer, context.layers) == (5, 1, LAYERS)
    assert deviation == blender.deviation.tolist()
    assert context.token_ids.tolist() == list(range(TOKENS))
    assert [segment.kind for segment in context.segments] == ["document"]


def test_layers_below_the_check_layer_can_be_asked_for():
    seen = {}

    class Below(Chooser):
        needs = frozenset({"key-deviation"})

    def select(context):
        seen["below"] = context.key_deviation(0).tolist()
        return context.positions[: context.k]

    _, blender = blended(Below(select))
    assert np.allclose(seen["below"], blender.deviation)


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (LegoLink(), "starts at the first-layer"),
        (CacheBlendGradual(), "narrows its selection"),
        (Chooser(lambda context: context.positions[:1]), "returned 1 positions, not k = 5"),
        (Chooser(lambda context: 1 / 0), "policy 'chooser' failed: ZeroDivisionError"),
        (Chooser(lambda context: sys.exit(0)), "policy 'chooser' failed: SystemExit"),
    ],
)
def test_a_policy_that_fails_is_told_and_lmcaches_own_selection_goes_on(policy, told):
    seen, blender = blended(policy, 0.5)
    assert told in seen.failure.message
    assert seen.failure.hint
    assert blender.selected.tolist() == blender.deviation.topk(5).indices.sort().values.tolist()


def test_a_budget_that_fails_is_told_too():
    class Greedy(TokenTopK):
        def budget(self, request):
            return 99

    seen, blender = blended(Greedy(), 0.5)
    assert "budget 99" in seen.failure.message
    assert len(blender.selected) == 3


def test_a_watched_policy_says_what_it_noticed():
    seen, _ = blended(watched(TokenTopK(), follow=False))
    assert seen.decided == 0
    assert seen.untimed_seconds > 0
    assert blended(TokenTopK())[0].decided is None


def test_without_a_job_topk_is_torchs():
    hook = BlendHook(SimpleNamespace(serving=None))
    values = torch.tensor([1.0, 5.0, 3.0])
    assert hook.topk(values, k=2).indices.tolist() == [1, 2]
    blender = Blender(hook)
    hook._blend(Blender.blend)(blender, torch.arange(TOKENS))
    assert blender.layers == [0, 1, 2, 3]
