"""LMCache's blending on vLLM's CPU backend: a vehicle for tests and demonstrations, nothing that anybody deploys.

LMCache refuses to blend without an accelerator. What it lacks here is put in its place by substitution in its modules:
streams that do nothing, attention by torch with the mask that flash-attention has there (bottom-right), and the
transfer of keys and values from and to vLLM's packed CPU cache. Everything else is LMCache's own code. On a machine
with an accelerator nothing of this module is in force.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from kvaudit.engines.vllm.worker.lmcache_api import Stand

_IN_FORCE: list[bool] = []


def in_force() -> bool:
    return bool(_IN_FORCE)


def install() -> None:
    """Must run before LMCache makes its connector. Raises RuntimeError where LMCache has an accelerator."""
    import lmcache

    if lmcache.torch_device_type != "cpu":
        raise RuntimeError("LMCache's CPU shim has no place on an accelerator")
    if not _IN_FORCE:
        _IN_FORCE.append(True)
        _stand_in_for_streams_and_transfers()
        _make_layerwise_connectors()
        _attend_by_torch()


def _stand_in_for_streams_and_transfers() -> None:
    from lmcache.v1.gpu_connector import gpu_connectors as module
    from lmcache.v1.platform.devices.cpu.stub_cpu_device import StubCPUDevice, StubStream

    streams = StubCPUDevice("cpu")
    streams.Stream = StubStream
    module.torch = Stand(torch, cuda=streams)
    module.device_ops = Stand(module.device_ops, single_layer_kv_transfer=transfer_layer)
    module.assert_is_vllm_mla_or_flash_attn_or_flash_infer = lambda layout: None


def _make_layerwise_connectors() -> None:
    import lmcache.v1.gpu_connector as package
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector import gpu_connectors as module

    create = package.CreateGPUConnector

    def create_on_cpu(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
        if engine != EngineType.VLLM or not (config.use_layerwise and config.enable_blending):
            return create(config, metadata, engine, layout_hints)
        return module.VLLMBufferLayerwiseGPUConnector.from_metadata(
            metadata, True, torch.device("cpu"), layout_hints=layout_hints
        )

    package.CreateGPUConnector = create_on_cpu


def _attend_by_torch() -> None:
    from lmcache.v1.compute.attention.abstract import AttentionInterface
    from lmcache.v1.compute.models import base

    AttentionInterface.register(TorchAttention)
    base.infer_attn_backend_from_vllm = lambda attention, enable_sparse=False: TorchAttention(attention)
    compiled = base.LMCBaseModel.compute_layer
    base.LMCBaseModel.compute_layer = getattr(compiled, "_torchdynamo_orig_callable", compiled)


class TorchAttention:
    """Attention of M query rows over N keys, causal with the mask aligned to the bottom right: row j of M sees keys up
    to N - M + j, as flash-attention has it for LMCache's blend."""

    def __init__(self, attention: Any) -> None:
        self._scale = attention.impl.scale

    def init_attn_metadata(self, input_ids: Tensor, **_: Any) -> Any:
        from lmcache.v1.compute.attention.metadata import LMCFlashAttnMetadata

        tokens = len(input_ids)
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        return LMCFlashAttnMetadata(starts, torch.tensor([tokens]), starts.clone(), tokens, tokens)

    def forward_contiguous(self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, metadata: Any, **_: Any) -> Tensor:
        rows, keys = len(q), len(k)
        limits = torch.arange(rows) + keys - rows
        made = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=torch.arange(keys)[None, :] <= limits[:, None],
            scale=self._scale,
            enable_gqa=True,
        )
        output.copy_(made[0].transpose(0, 1))
        return output


def transfer_layer(
    buffer: Tensor, cache_of_layer: Tensor, slots: Tensor, direction: Any, _format: Any, token_major: bool = False
) -> None:
    """Keys and values between a buffer [2, tokens, KV heads x head dim] and the slots of vLLM's packed CPU cache
    [blocks, KV heads, block size, 2 x head dim] of one layer."""
    from lmcache import lmcache_native

    keys, values = (buffer[:, 0], buffer[:, 1]) if token_major else (buffer[0], buffer[1])
    _, heads, block, double = cache_of_layer.shape
    tokens, width = len(keys), double // 2
    slots = slots[:tokens].long()
    if int(direction) == int(lmcache_native.TransferDirection.H2D):
        _pack(keys.reshape(tokens, heads, width), values.reshape(tokens, heads, width), cache_of_layer, slots)
        return
    blocks, block_of = torch.unique(slots // block, return_inverse=True)
    packed = cache_of_layer.view(-1, heads, 2 * block, width)[blocks].chunk(2, dim=2)
    for target, part, places in zip((keys, values), packed, _places(cache_of_layer.dtype, block, width), strict=True):
        rows = part.reshape(len(blocks), heads, block * width)[:, :, places].view(-1, heads, block, width)
        target.copy_(rows[block_of, :, slots % block].reshape(tokens, heads * width))


def _pack(keys: Tensor, values: Tensor, cache_of_layer: Tensor, slots: Tensor) -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, heads, block, double = cache_of_layer.shape
    key_cache, value_cache = cache_of_layer.view(blocks, heads, 2 * block, double // 2).chunk(2, dim=2)
    isa = _get_attn_isa(cache_of_layer.dtype, block, double // 2, "auto")
    ops.cpu_attn_reshape_and_cache(
        keys.contiguous(),
        values.contiguous(),
        key_cache,
        value_cache,
        slots,
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )


@cache
def _places(dtype: torch.dtype, block: int, width: int) -> tuple[Tensor, Tensor]:
    """Where vLLM's kernel packs (token, dim) of a block, for keys and for values: learnt by packing known numbers.

    They are packed as two digits, so that every dtype holds them exactly.
    """
    numbers = torch.arange(block * width).view(block, 1, width)
    found = [torch.zeros(block * width, dtype=torch.long) for _ in range(2)]
    for factor, digits in ((128, numbers // 128), (1, numbers % 128)):
        packed = torch.zeros(1, 1, block, 2 * width, dtype=dtype)
        written = digits.to(dtype)
        _pack(written, written, packed, torch.arange(block))
        for place, part in enumerate(packed.view(1, 1, 2 * block, width).chunk(2, dim=2)):
            found[place] += factor * part.reshape(-1).float().long()
    for each in found:
        if not torch.equal(each.sort().values, torch.arange(block * width)):
            raise RuntimeError(f"vLLM packs {dtype} keys in blocks of {block} x {width} in a way that is not known")
    return found[0].argsort(), found[1].argsort()
