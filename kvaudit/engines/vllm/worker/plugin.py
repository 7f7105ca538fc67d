"""vLLM's plug-in: loaded in every process of every vLLM on a machine where kvaudit is installed.

It does nothing unless `ENABLED` is set, as kvaudit's own engines do before they start vLLM. Then the model is made
known to LMCache and LMCache is wrapped, once, when the model has been loaded and before the connector is made.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvaudit.engines.vllm.worker.orphans import end_with_parent

if TYPE_CHECKING:
    from kvaudit.engines.vllm.worker.session import Session

ENABLED = "KVAUDIT_WORKER"
"""The environment variable; any value but an empty one."""

_SESSIONS: list[Session] = []
"""The session of this process, once LMCache is wrapped."""


def register() -> None:
    """The entry point."""
    if not os.environ.get(ENABLED):
        return
    end_with_parent()
    from vllm.v1.worker.gpu_worker import Worker

    load = Worker.load_model
    if getattr(load, "is_kvaudits", False):
        return

    def load_model(worker: Any, *arguments: Any, **named: Any) -> Any:
        loaded = load(worker, *arguments, **named)
        if worker.vllm_config.kv_transfer_config is not None:
            _take_hold(worker.model_runner.get_model())
        return loaded

    load_model.is_kvaudits = True  # type: ignore[attr-defined]
    Worker.load_model = load_model


def session() -> Session | None:
    """None where no LMCache is in force in this process."""
    return _SESSIONS[0] if _SESSIONS else None


def _take_hold(model: Any) -> None:
    from kvaudit.engines.vllm.worker import blending, cpu_shim, lmcache_api, serving
    from kvaudit.engines.vllm.worker.session import Session

    lmcache_api.register_model(model)
    if _SESSIONS:
        _SESSIONS[0].forget()
        return
    _SESSIONS.append(Session())
    if lmcache_api.device_type() == "cpu":
        cpu_shim.install()
    serving.install(_SESSIONS[0])
    blending.BlendHook(_SESSIONS[0]).install()
