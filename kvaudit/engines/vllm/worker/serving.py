"""Hooks around LMCache's connector and store: what is looked up, loaded and stored, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from kvaudit.engines.vllm.worker import lmcache_api
from kvaudit.engines.vllm.worker.job import Rows
from kvaudit.engines.vllm.worker.session import Session

Method = Callable[..., Any]


def install(session: Session) -> None:
    lmcache_api.wrap_connector(
        __init__=lambda method: _made(session, method),
        get_num_new_matched_tokens=lambda method: _looking_up(session, method),
        save_kv_layer=lambda method: _saving(session, method),
        wait_for_save=lambda method: _saved(session, method),
    )
    lmcache_api.wrap_transfer(batched_to_gpu=lambda method: _loading(session, method))
    lmcache_api.wrap_store(batched_put=lambda method: _putting(session, method))


def _made(session: Session, method: Method) -> Method:
    def __init__(connector: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
        method(connector, *arguments, **named)
        session.roles.add(lmcache_api.role_of(connector))

    return __init__


def _looking_up(session: Session, method: Method) -> Method:
    def get_num_new_matched_tokens(connector: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        if session.now is not None and session.now.job.mode == "prefill":
            return 0
        found = method(connector, request, *arguments, **named)
        if session.now is not None:
            spec = connector.load_specs.get(request.request_id)
            session.now.looked_up = 0 if spec is None else int(spec.lmcache_cached_tokens)
        return found

    return get_num_new_matched_tokens


def _saving(session: Session, method: Method) -> Method:
    def save_kv_layer(connector: Any, *arguments: Any, **named: Any) -> None:
        if session.now is None or session.now.job.mode != "prefill":
            method(connector, *arguments, **named)

    return save_kv_layer


def _saved(session: Session, method: Method) -> Method:
    def wait_for_save(connector: Any, *arguments: Any, **named: Any) -> None:
        method(connector, *arguments, **named)
        seen = session.now
        if seen is None or seen.job.rows is None or seen.rows is not None:
            return
        slots = lmcache_api.slots_of(connector)
        if slots is None:
            return
        with seen.untimed():
            if max(seen.job.rows, default=0) >= len(slots):
                seen.errors.append(f"rows were asked for beyond the {len(slots)} tokens that LMCache sees")
            else:
                seen.rows = Rows(seen.job.rows, *lmcache_api.read_rows(connector, slots[list(seen.job.rows)]))

    return wait_for_save


def _loading(session: Session, method: Method) -> Method:
    def batched_to_gpu(transfer: Any, starts: list[int], ends: list[int], **named: Any) -> Any:
        session.loading(list(zip(starts, ends, strict=True)))
        return method(transfer, starts, ends, **named)

    return batched_to_gpu


def _putting(session: Session, method: Method) -> Method:
    def batched_put(store: Any, keys: Any, memories: Any, *arguments: Any, **named: Any) -> Any:
        with nullcontext() if session.now is None else session.now.untimed():
            engine = lmcache_api.engine()
            if engine is not None:
                session.putting(lmcache_api.puts(engine, keys, memories))
        return method(store, keys, memories, *arguments, **named)

    return batched_put
