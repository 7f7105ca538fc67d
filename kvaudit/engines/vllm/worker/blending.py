"""kvaudit's policies inside LMCBlender, in place of its top-k, and what it computes there.

LMCBlender selects once, in `process_qkv` at its check layer: it computes the deviation of N tokens, asks `torch.topk`
for the k largest, k = max(1, int(ratio N)), and goes on with those rows. The hook answers that one call. The deviation
is the tensor that LMCache hands to it, so that a policy that ranks by it selects what LMCache itself would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines.vllm.worker import lmcache_api
from kvaudit.engines.vllm.worker.job import Blended, Failure
from kvaudit.engines.vllm.worker.ledger import segment_views
from kvaudit.engines.vllm.worker.session import Observed, Session, synchronise
from kvaudit.engines.vllm.worker.signals import BlendSignals, Distances
from kvaudit.errors import KvauditError, PolicyError
from kvaudit.policies import (
    BudgetContext,
    Policy,
    SegmentView,
    SelectionContext,
    checked_budget,
    checked_schedule,
    checked_selection,
    ratio_budget,
)
from kvaudit.policies.rounding import Watched
from kvaudit.policies.seeding import generator

Method = Callable[..., Any]


class NothingSelectedError(Exception):
    """Ends LMCache's own pass where a policy selects no token: what was loaded stays as it is."""


@dataclass(slots=True)
class Pass:
    """One blend under way. `at` is the layer at which LMCache selects right now, None elsewhere."""

    seen: Observed
    layers: int
    below: dict[int, Distances] = field(default_factory=dict)
    at: Layer | None = None
    chosen_k: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    """What LMCBlender has at hand at its check layer. Keys and values are [N, KV heads x head dim], fresh keys not yet
    rotated, which their norms do not see."""

    index: int
    keys: Tensor
    values: Tensor
    loaded_values: Tensor


class BlendHook:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._pass: Pass | None = None

    def install(self) -> None:
        lmcache_api.replace_topk(_uncompiled(self.topk))
        lmcache_api.wrap_blender(blend=self._blend, process_qkv=self._process_qkv)
        lmcache_api.wrap_model(compute_layer=self._compute_layer)

    def topk(self, deviation: Tensor, k: int, **named: Any) -> Any:
        """In place of `torch.topk` in LMCBlender. Positions of the k selected tokens."""
        now = self._pass
        if now is None or now.at is None:
            return torch.topk(deviation, k=k, **named)
        signals = _signals(now, deviation)
        selected = self._selected(now, now.at, signals, deviation, k)
        with now.seen.untimed():
            positions = np.sort(selected.cpu().numpy().astype(np.int64))
            now.seen.blended = Blended(
                len(deviation), now.at.index, _budget(now, len(deviation)), positions, signals.deviation_as_recorded()
            )
        if not len(positions):
            raise NothingSelectedError
        return SimpleNamespace(indices=selected)

    def _selected(self, now: Pass, at: Layer, signals: BlendSignals, deviation: Tensor, k: int) -> Tensor:
        policy = now.seen.job.policy
        if policy is None or now.seen.failure is not None:
            return torch.topk(deviation, k=k).indices
        if now.seen.job.mode == "own":
            selected = torch.topk(deviation, k=k).indices
            _look_on(policy, now, at.index, signals, len(deviation), k)
            return selected
        try:
            chosen = _chosen(policy, now, at.index, signals, len(deviation))
        except (Exception, SystemExit) as error:
            now.seen.failure = _failure(policy, error)
            return torch.topk(deviation, k=k).indices
        return torch.from_numpy(chosen).to(deviation.device)

    def _blend(self, method: Method) -> Method:
        def blend(blender: Any, *arguments: Any, **named: Any) -> Any:
            seen = self._session.serving
            self._pass = None if seen is None else Pass(seen, blender.num_layers)
            try:
                return method(blender, *arguments, **named)
            finally:
                self._pass = None
                blender.metadata.clean()

        return blend

    def _process_qkv(self, method: Method) -> Method:
        def process_qkv(
            blender: Any, q: Tensor, k: Tensor, v: Tensor, residual: Tensor, layer_id: int, *arguments: Any
        ) -> Any:
            now = self._pass
            if now is None:
                return method(blender, q, k, v, residual, layer_id, *arguments)
            if layer_id not in blender.common_metadata.check_layers:
                made = method(blender, q, k, v, residual, layer_id, *arguments)
                if now.seen.blended is None:
                    _keep_distances(now, layer_id, made[1], made[2], *blender.gpu_connector.get_kv(layer_id))
                return made
            now.at = Layer(layer_id, k, v, blender.gpu_connector.get_kv(layer_id)[1])
            try:
                with ratio_for_k(blender, now, len(k)):
                    return method(blender, q, k, v, residual, layer_id, *arguments)
            finally:
                now.at = None

        return _uncompiled(process_qkv)

    def _compute_layer(self, method: Method) -> Method:
        def compute_layer(model: Any, input_ids: Tensor) -> Iterator[None]:
            running = method(model, input_ids)
            going = True
            for _ in range(model.num_layers):
                if going:
                    try:
                        next(running)
                    except NothingSelectedError:
                        going = False
                yield

        return compute_layer


def _uncompiled(function: Method) -> Method:
    """On an accelerator LMCache compiles its pass; what is observed of it must not be."""
    made: Method = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return made


@contextmanager
def ratio_for_k(blender: Any, now: Pass, tokens: int) -> Iterator[None]:
    """Within it LMCBlender's ratio is one that gives the policy's k, for k of at least 1."""
    policy, metadata = now.seen.job.policy, blender.common_metadata
    if policy is None or now.seen.job.mode == "own":
        yield
        return
    try:
        now.chosen_k = checked_budget(policy, _budget_context(now, tokens))
    except (Exception, SystemExit) as error:
        now.seen.failure = _failure(policy, error)
        yield
        return
    ratios, metadata.recomp_ratios = metadata.recomp_ratios, [(now.chosen_k + 0.5) / tokens]
    try:
        yield
    finally:
        metadata.recomp_ratios = ratios


def _budget(now: Pass, tokens: int) -> int:
    """How many were to be selected: the policy's own number, or what LMCache was opened to select."""
    job = now.seen.job
    return now.chosen_k if job.mode == "policy" else ratio_budget(tokens, job.ratio)


def _budget_context(now: Pass, tokens: int) -> BudgetContext:
    return BudgetContext(tokens, now.seen.job.ratio, _segments(now), np.arange(tokens, dtype=np.int64))


def _segments(now: Pass) -> Sequence[SegmentView]:
    return segment_views(now.seen.job.prompt, now.seen.loaded)


def _chosen(policy: Policy, now: Pass, layer: int, signals: BlendSignals, tokens: int) -> np.ndarray[Any, Any]:
    """The policy's selection, int64 [k]. Raises PolicyError for a policy that LMCBlender cannot follow."""
    job, layers = now.seen.job, now.layers
    if policy.start != "check-layer":
        raise PolicyError(
            f"policy {policy.name!r} starts at the {policy.start}, and LMCBlender selects at its check layer",
            "replay it on the embedded engine",
        )
    if now.chosen_k and checked_schedule(policy, now.chosen_k, tokens, layers - layer) is not None:
        raise PolicyError(
            f"policy {policy.name!r} narrows its selection layer by layer, and LMCBlender selects once",
            "replay it on the embedded engine",
        )
    if not now.chosen_k:
        return np.empty(0, dtype=np.int64)
    context = SelectionContext(
        policy=policy.name,
        request_id=job.request_id,
        layer=layer,
        layers=layers,
        k=now.chosen_k,
        positions=np.arange(tokens, dtype=np.int64),
        token_ids=np.asarray(job.prompt.token_ids, dtype=np.int64),
        segments=_segments(now),
        rng=generator(job.seed, job.request_id),
        needs=policy.needs,
        signals=signals,
    )
    untimed, decided = policy.untimed_seconds, policy.decided if isinstance(policy, Watched) else None
    try:
        return checked_selection(policy, context)
    finally:
        now.seen.untimed_seconds += policy.untimed_seconds - untimed
        if decided is not None and isinstance(policy, Watched):
            now.seen.decided = policy.decided - decided


def _look_on(policy: Policy, now: Pass, layer: int, signals: BlendSignals, tokens: int, k: int) -> None:
    """Ask a watched policy beside LMCache's own selection. None of it is part of TTFT."""
    synchronise()
    before, began = now.seen.untimed_seconds, perf_counter()
    now.chosen_k = k
    try:
        _chosen(policy, now, layer, signals, tokens)
    except (Exception, SystemExit) as error:
        now.seen.failure = _failure(policy, error)
    finally:
        now.seen.untimed_seconds = before + perf_counter() - began


def _signals(now: Pass, deviation: Tensor) -> BlendSignals:
    assert now.at is not None
    at = now.at
    return BlendSignals(at.index, deviation, at.keys, at.values, at.loaded_values, now.below)


def _keep_distances(now: Pass, layer: int, keys: Tensor, values: Tensor, *loaded: Tensor) -> None:
    """What a policy may ask for of a layer below the check layer; its buffers are gone by then."""
    policy = now.seen.job.policy
    if policy is not None and policy.needs & {"key-deviation", "value-deviation"}:
        now.below[layer] = Distances.of(keys, values, *loaded)


def _failure(policy: Policy, error: BaseException) -> Failure:
    if isinstance(error, KvauditError):
        return Failure(error.message, error.hint)
    return Failure(f"policy {policy.name!r} failed: {type(error).__name__}: {error}", "mend the policy")
