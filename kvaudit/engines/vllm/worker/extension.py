"""What kvaudit's engines call in vLLM's worker by `LLM.collective_rpc`: plain data in, plain data out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvaudit.engines.vllm.worker import plugin
from kvaudit.engines.vllm.worker.job import Job

if TYPE_CHECKING:
    from kvaudit.engines.vllm.worker.session import Session


class WorkerExtension:
    """For vLLM's `worker_extension_cls`: vLLM's worker class inherits from it."""

    model_runner: Any
    vllm_config: Any
    device: Any

    def kvaudit_health(self) -> dict[str, object]:
        """What is in force in this process. `connector` is None where no LMCache is.

        In `connector`, `trouble` says what would make LMCache degrade in silence; None where nothing would.
        """
        model = self.model_runner.get_model()
        return {
            "model": type(model).__name__,
            "layers": len(model.model.layers),
            "device": str(self.device),
            "attention_backend": _attention_backend(model),
            "connector": None if self.vllm_config.kv_transfer_config is None else _lmcache_health(model),
        }

    def kvaudit_request(self, job: bytes) -> None:
        _session().begin(Job.unpacked(job))

    def kvaudit_record(self) -> bytes:
        return _session().finish().packed()

    def kvaudit_clear(self) -> dict[str, int]:
        """Empties LMCache. What is left, as observed in its store."""
        from kvaudit.engines.vllm.worker import lmcache_api

        _session().clear()
        found = lmcache_api.engine()
        if found is None:
            raise RuntimeError("LMCache made no engine: there is nothing to empty")
        left = lmcache_api.stored(found)
        return {"entries": len(left), "size_bytes": sum(each.size_bytes for each in left.values())}

    def kvaudit_keys(self) -> list[dict[str, object]]:
        """What is stored now, one a chunk; `content_id` and `writer` are None where the ledger saw no write of it."""
        from kvaudit.engines.vllm.worker import lmcache_api

        ledger, made = _session().ledger, []
        found = lmcache_api.engine()
        for key, held in ({} if found is None else lmcache_api.stored(found)).items():
            entry = ledger.get(key)
            made.append(
                {
                    "key": key,
                    "tokens": held.tokens,
                    "position": held.position,
                    "layers": held.layers,
                    "size_bytes": held.size_bytes,
                    "content_id": None if entry is None else entry.write.content_id,
                    "writer": None if entry is None else entry.writer_request_id,
                }
            )
        return made


def _session() -> Session:
    found = plugin.session()
    if found is None:
        raise RuntimeError(f"kvaudit is not in force in this process: {plugin.ENABLED} was not set when vLLM started")
    return found


def _lmcache_health(model: Any) -> dict[str, object]:
    from kvaudit.engines.vllm.worker import cpu_shim, lmcache_api

    session, found, blender = plugin.session(), lmcache_api.engine(), lmcache_api.blender()
    told = lmcache_api.trouble(found)
    return {
        "hooked": session is not None,
        "roles": [] if session is None else sorted(session.roles),
        "engine": found is not None,
        "blender": blender is not None,
        "model_registered": lmcache_api.registered_model() is model,
        "shim": cpu_shim.in_force(),
        "settings": {} if found is None else lmcache_api.settings(found),
        "trouble": told,
    }


def _attention_backend(model: Any) -> str | None:
    attention = getattr(model.model.layers[0].self_attn, "attn", None)
    return None if attention is None else type(attention.impl).__name__
