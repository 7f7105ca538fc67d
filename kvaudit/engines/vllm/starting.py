"""From settings to a start of vLLM: model folder, lengths, memory, environment, log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from kvaudit.engines import EngineSettings, log_folder
from kvaudit.engines.vllm.folder import ModelFolder, model_folder
from kvaudit.engines.vllm.launch import HASH_SEED, Launch
from kvaudit.engines.vllm.options import LONGEST, Options
from kvaudit.engines.vllm.versions import Device, EngineName, installed_version, require
from kvaudit.engines.vllm.worker.plugin import ENABLED
from kvaudit.errors import UsageError
from kvaudit.models.fetch import cache_folder
from kvaudit.models.reading import open_tokenizer
from kvaudit.models.tokenizer import ModelTokenizer

_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The worker in the engine's own process, as on one GPU; on the CPU vLLM takes another process unless it is named."""
_SPARE_TOKENS = 2048
"""Room in the cache beside the longest prompt: blocks are filled up, and some are vLLM's own."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of an engine before it starts. `max_model_len` counts prompt and answer."""

    device: Device
    folder: ModelFolder
    config: Mapping[str, Any]
    tokenizer: ModelTokenizer
    end_ids: frozenset[int]
    max_model_len: int
    versions: Mapping[str, str]
    dtype: str

    @classmethod
    def of(cls, engine: EngineName, settings: EngineSettings, options: Options) -> Place:
        row = require(engine, settings.device)
        packages = (row.package, "lmcache") if engine == "lmcache" else (row.package,)
        folder = model_folder(settings.model)
        config = _json(folder.path / "config.json")
        tokenizer = open_tokenizer(settings.model).tokenizer
        return cls(
            device=row.device,
            folder=folder,
            config=config,
            tokenizer=tokenizer,
            end_ids=tokenizer.end_ids | _end_ids(config) | _end_ids(_json(folder.path / "generation_config.json")),
            max_model_len=_max_model_len(config, options),
            versions={package: installed_version(package) or "" for package in packages},
            dtype=settings.dtype,
        )

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def token_bytes(self) -> int:
        """Of the keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES[self.dtype]

    @property
    def architecture(self) -> str:
        return str(next(iter(self.config.get("architectures") or ()), ""))

    @property
    def rope_type(self) -> str:
        """`default` or nothing where the rotation is not scaled."""
        told = (self.config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
        types = {str(rope.get("rope_type") or rope.get("type") or "") for rope in told}
        return next(iter(sorted(types - {"", "default"})), "")

    def describe(self) -> dict[str, object]:
        return {
            **self.folder.describe(),
            "family": self.config.get("model_type"),
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            **({"threads": _threads()} if self.device == "cpu" else {}),
            **self.versions,
        }


def starting_arguments(place: Place, settings: EngineSettings, options: Options, *, prefix_caching: bool) -> Launch:
    """A start of vLLM alone; the LMCache engine adds to it."""
    arguments: dict[str, Any] = {
        "model": str(place.folder.path),
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "seed": 0,
        "max_model_len": place.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens or place.max_model_len,
        "max_num_seqs": 1,
        "max_logprobs": 1024,
        "enforce_eager": not options.cuda_graphs,
        "enable_prefix_caching": prefix_caching,
        "disable_log_stats": False,
        "distributed_executor_backend": _EXECUTOR,
    }
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(options.start_seconds)),
        "VLLM_NO_USAGE_STATS": "1",
        ENABLED: "1",
        HASH_SEED: _hash_seed(),
    }
    if place.device == "cpu":
        arguments["kv_cache_memory_bytes"] = (place.max_model_len + _SPARE_TOKENS) * place.token_bytes
        environment |= _cpu_environment()
    if options.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return Launch(
        arguments=arguments,
        environment=environment,
        log=(log_folder() or cache_folder() / "logs") / f"vllm-{os.getpid()}.log",
        start_seconds=options.start_seconds,
        answer_seconds=options.answer_seconds,
    )


def with_more(launch: Launch, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Launch:
    return replace(
        launch,
        arguments={**launch.arguments, **arguments},
        environment={**launch.environment, **environment},
    )


def _cpu_environment() -> dict[str, str]:
    """Threads that wait without spinning: on shared cores spinning makes a token take twenty times as long."""
    return {
        "OMP_NUM_THREADS": _threads(),
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }


def _threads() -> str:
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // 2))


def _hash_seed() -> str:
    """vLLM and LMCache make cache keys with Python's hash, which is another one in every process without a seed."""
    given = os.environ.get(HASH_SEED, "")
    return given if given.isdecimal() else "0"


def _max_model_len(config: Mapping[str, Any], options: Options) -> int:
    own = int(config.get("max_position_embeddings") or LONGEST)
    asked = options.max_model_len
    if asked is not None and asked > own:
        raise UsageError(f"max-model-len is {asked}, and the model takes {own} tokens", f"give at most {own}")
    return asked or min(own, LONGEST)


def _end_ids(config: Mapping[str, Any]) -> frozenset[int]:
    ids = config.get("eos_token_id")
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{path} is no JSON", "the model's folder is damaged") from error
    return found if isinstance(found, dict) else {}
