"""vLLM with LMCache in a process of its own, driven job by job as kvaudit's engine drives it."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvaudit.engines.vllm.folder import model_folder
from kvaudit.engines.vllm.launch import Asked, Launch, Running
from kvaudit.engines.vllm.worker.job import Job, Record
from kvaudit.engines.vllm.worker.plugin import ENABLED

LMCACHE = {
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_CHUNK_SIZE": "16",
    "LMCACHE_USE_LAYERWISE": "True",
    "LMCACHE_ENABLE_BLENDING": "True",
    "LMCACHE_BLEND_CHECK_LAYERS": "1",
    "LMCACHE_BLEND_RECOMPUTE_RATIOS": "0.15",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
    "LMCACHE_TRACK_USAGE": "false",
}
RATIO = 0.15


@dataclass
class Rig:
    running: Running
    served: int = 0

    def serve(self, prompt, mode="own", policy=None, rows=None, request_id=None, tokens=4) -> tuple[Asked, Record]:
        self.served += 1
        job = Job(request_id or f"r{self.served}", "request", prompt, mode, RATIO, 0, policy, rows)
        self.running.rpc("kvaudit_request", job.packed())
        asked = self.running.ask(prompt.token_ids, tokens, lambda token: False, 5)
        return asked, Record.unpacked(self.running.rpc("kvaudit_record"))

    def clear(self) -> dict[str, int]:
        return self.running.rpc("kvaudit_clear")

    def keys(self) -> dict[str, dict[str, Any]]:
        return {each["key"]: each for each in self.running.rpc("kvaudit_keys")}


@contextmanager
def open_rig(connector=True, **lmcache):
    arguments: dict[str, Any] = {
        "model": str(model_folder("smollm2-135m").path),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 1,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 256 << 20,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "worker_extension_cls": "kvaudit.engines.vllm.worker.extension.WorkerExtension",
    }
    if connector:
        arguments["kv_transfer_config"] = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "PYTHONHASHSEED": "0",
        ENABLED: "1",
        **LMCACHE,
        **lmcache,
    }
    with TemporaryDirectory() as folder:
        running = Running(Launch(arguments, environment, Path(folder) / "log", 600.0, 300.0))
        try:
            yield Rig(running)
        finally:
            running.close()


def words(seed, count):
    chosen = random.Random(seed)
    return tuple(chosen.randrange(1000, 40000) for _ in range(count))


def answers(asked: Asked) -> list[tuple[int, dict[int, float]]]:
    """Token ids and log-probabilities, for comparison bit by bit."""
    return [(token.token_id, dict(token.top)) for token in asked.tokens]
