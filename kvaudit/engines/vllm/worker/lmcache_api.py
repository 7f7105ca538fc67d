"""The places of LMCache's in-process engine that kvaudit reads or wraps, all in one module: where a version moves one,
it is mended here. Run with LMCache 0.5.6, held against the code of 0.5.1; `versions` holds the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvaudit.policies import Floats

LOGGERS = "lmcache"
"""How the names of LMCache's loggers begin. Each has a handler of its own and passes nothing on."""

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk in the CPU backend. position: of its first token where it was written, None where that was not kept.
    layers: how many of its layers are there; LMCache evicts them one by one."""

    tokens: int
    position: int | None
    layers: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Put:
    """A chunk's first layer on its way into the store. `position` as in `Stored`; bytes are those of all layers."""

    key: str
    position: int | None
    tokens: int
    size_bytes: int
    held: bool


def engine() -> Any | None:
    """LMCache's engine in this process; None where there is none, in which case LMCache runs everything cold."""
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    return LMCacheEngineBuilder.get(ENGINE_NAME)


def blender() -> Any | None:
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.compute.blend.utils import LMCBlenderBuilder

    return LMCBlenderBuilder._blenders.get(ENGINE_NAME)


def register_model(model: Any) -> None:
    """LMCache asks its tracker for the model and nobody tells it (LMCache issue 4131).

    What an engine before this one left in the process goes: LMCache would keep its model and its blender.
    """
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.compute.blend.utils import LMCBlenderBuilder
    from lmcache.v1.compute.models.utils import VLLMModelTracker

    LMCBlenderBuilder._blenders.pop(ENGINE_NAME, None)
    VLLMModelTracker._vllm_models.pop(ENGINE_NAME, None)
    VLLMModelTracker.register_model(ENGINE_NAME, model)


def registered_model() -> Any | None:
    from lmcache.integration.vllm.utils import ENGINE_NAME
    from lmcache.v1.compute.models.utils import VLLMModelTracker

    return VLLMModelTracker._vllm_models.get(ENGINE_NAME)


def device_type() -> str:
    import lmcache

    return str(lmcache.torch_device_type)


def trouble(found: Any | None) -> str | None:
    """Why this engine would run cold without saying so; None where it would not."""
    if found is None:
        return "LMCache made no engine: every request would run cold"
    if not found.is_healthy():
        return "LMCache says that it is not healthy: it would skip every lookup, load and store"
    if found.storage_manager is None:
        return "LMCache has no storage manager"
    if found.is_frozen():
        return "LMCache is frozen: nothing would be stored"
    return None


def settings(found: Any) -> dict[str, object]:
    """What is in force, in plain data."""
    config = found.config
    names = ("chunk_size", "enable_blending", "use_layerwise", "blend_check_layers", "blend_recompute_ratios")
    more = ("blend_thresholds", "blend_special_str", "save_unfull_chunk", "min_retrieve_tokens", "max_local_cpu_size")
    tokens = getattr(found.token_database, "sep_tokens", None)
    return {
        **{name: getattr(config, name, None) for name in (*names, *more)},
        "separator_ids": None if tokens is None else [int(token) for token in tokens],
        "layers": int(found.num_layers),
        "backends": list(found.storage_manager.storage_backends) if found.storage_manager else [],
    }


def split(found: Any, token_ids: Sequence[int]) -> list[tuple[int, int, str]]:
    """(start, end, key) of every chunk that LMCache makes of a prompt; empty ones too, which it never stores."""
    chunks = found.token_database.process_tokens(tokens=list(token_ids))
    return [(int(start), int(end), _hex(key)) for start, end, key in chunks]


def stored(found: Any) -> dict[str, Stored]:
    """What the CPU backend holds, by key."""
    held: dict[str, Stored] = {}
    for key, memory in list(_cpu_backend(found).hot_cache.items()):
        name, old = _hex(key), held.get(_hex(key))
        position = _position(memory) if old is None or old.position is None else old.position
        size = memory.get_size() + (old.size_bytes if old else 0)
        held[name] = Stored(_tokens(memory), position, 1 + (old.layers if old else 0), int(size))
    return held


def clear(found: Any) -> None:
    found.clear()


def role_of(connector: Any) -> str:
    """`SCHEDULER` or `WORKER`."""
    return str(connector._role.name)


def puts(found: Any, keys: Sequence[Any], memories: Sequence[Any]) -> list[Put]:
    """The chunks of which this call puts the first layer. `held`: the key is in the store, which keeps what it has."""
    hot, seen, made = _cpu_backend(found).hot_cache, set(), []
    for key, memory in zip(keys, memories, strict=False):
        if getattr(key, "layer_id", None) == 0:
            held = key in hot or key in seen
            seen.add(key)
            size = int(memory.get_size()) * int(found.num_layers)
            made.append(Put(_hex(key), _position(memory), _tokens(memory), size, held))
    return made


def wrap_connector(**wrappers: Wrapper) -> None:
    """Wrap methods of the connector that vLLM's scheduler and worker call."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    _wrap(LMCacheConnectorV1Impl, wrappers)


def wrap_transfer(**wrappers: Wrapper) -> None:
    """Wrap methods of what moves chunks into vLLM's paged cache while LMCache blends."""
    from lmcache.v1.gpu_connector.gpu_connectors import VLLMBufferLayerwiseGPUConnector

    _wrap(VLLMBufferLayerwiseGPUConnector, wrappers)


def wrap_store(**wrappers: Wrapper) -> None:
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    _wrap(StorageManager, wrappers)


def wrap_blender(**wrappers: Wrapper) -> None:
    from lmcache.v1.compute.blend.blender import LMCBlender

    _wrap(LMCBlender, wrappers)


def wrap_model(**wrappers: Wrapper) -> None:
    """Wrap methods of LMCache's own layer by layer pass."""
    from lmcache.v1.compute.models.base import LMCBaseModel

    _wrap(LMCBaseModel, wrappers)


def replace_topk(topk: Callable[..., Any]) -> None:
    """LMCBlender calls `torch.topk` once, at the check layer; in its module it becomes this function."""
    from lmcache.v1.compute.blend import blender as module

    module.torch = Stand(module.torch, topk=topk)


class Stand:
    """A module's stand-in: some of its names are others, everything else is the module's own."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def slots_of(connector: Any) -> Any | None:
    """The paged cache's slots of the prompt that is being served: int64 [tokens]; None where vLLM serves none."""
    requests = connector._parent._get_connector_metadata().requests
    return requests[0].slot_mapping if requests else None


def read_rows(connector: Any, slots: Any) -> tuple[Floats, Floats]:
    """Keys and values float32 [layers, P, KV heads x head dim] out of vLLM's paged cache, by LMCache's own transfer."""
    import torch
    from lmcache.v1.gpu_connector import gpu_connectors as module

    # One module of both until 0.5.1, two in 0.5.6.
    operations = getattr(module, "device_ops", None) or module.lmc_ops
    directions = (getattr(module, "lmcache_native", None) or module.lmc_ops).TransferDirection
    transfer, caches = connector.lmcache_engine.gpu_connector, list(connector.kv_caches.values())
    transfer.initialize_kvcaches_ptr(kvcaches=caches)
    transfer._lazy_initialize_buffer(transfer.kvcaches)
    buffer = torch.empty(transfer.get_shape(len(slots)), dtype=transfer.dtype, device=transfer.device)
    layers = []
    for cache in transfer.kvcaches:
        operations.single_layer_kv_transfer(
            buffer,
            cache,
            slots.to(transfer.device),
            directions.D2H,
            transfer.engine_kv_format,
            token_major=False,
        )
        layers.append(buffer.float().cpu().numpy().copy())
    both = np.stack(layers, axis=1)
    return both[0], both[1]


def _wrap(owner: Any, wrappers: dict[str, Wrapper]) -> None:
    for name, wrapper in wrappers.items():
        setattr(owner, name, wrapper(getattr(owner, name)))


def _cpu_backend(found: Any) -> Any:
    return found.storage_manager.storage_backends["LocalCPUBackend"]


def _position(memory: Any) -> int | None:
    positions = memory.metadata.cached_positions
    return None if positions is None or not len(positions) else int(positions[0])


def _tokens(memory: Any) -> int:
    """Of one layer of a chunk, [2, tokens, KV heads x head dim]; LMCache's own count is wrong for that format."""
    return int(memory.metadata.shape[1])


def _hex(key: Any) -> str:
    digest = key.chunk_hash
    return digest.hex() if isinstance(digest, bytes) else format(digest % (1 << 64), "016x")
