"""Real engines: vLLM, and vLLM with LMCache's blending. Only this package imports vllm and lmcache, always late.

versions.py   what is supported     folder.py     a model as vLLM loads it       engine.py     engine `vllm`
machine.py    what there is         options.py    `--option` of these engines    lmcache.py    engine `lmcache`
starting.py   how vLLM is started   settings.py   what would spoil an audit      opening.py    LMCache, looked after
launch.py     vLLM while it runs    answering.py  answers, held to a reference   resetting.py  a reset, proved
processes.py  ended for certain     chunking.py   LMCache's chunks, the trace's   worker/       inside vLLM
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvaudit.engines import Engine, EngineSettings


def open_vllm(settings: EngineSettings) -> Engine:
    from kvaudit.engines.vllm.engine import open_engine

    return open_engine(settings)


def open_lmcache(settings: EngineSettings) -> Engine:
    from kvaudit.engines.vllm.opening import open_engine

    return open_engine(settings)
