"""How the caches of known servers are emptied: HTTP calls, and what makes a server offer them.

Tried against the running servers (tests/real_servers): `vllm` and `vllm+connector` at vLLM 0.32, the latter without a
connector behind it, and `llamacpp` at llama.cpp b11549. `sglang` and `lmcache` follow what their projects document, and
`akv` assumes that a patched SGLang empties its cache as SGLang does. Whatever a call claims, the probe looks
(`probing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP call. `path` is that of the server's root, or of `--reset-url`'s server where `elsewhere`.

    `{slot}` in a path stands for each of the slots that GET /slots lists.
    """

    method: str
    path: str
    elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class Preset:
    """`hint`: what the server needs so that it offers the calls. `takes_url`: a call goes to a server of its own.
    `busy`: statuses with which this server says that it is in use, where others say that a request is wrong.
    """

    calls: tuple[Call, ...]
    hint: str
    elsewhere_port: int | None = None
    busy: frozenset[int] = frozenset()

    @property
    def takes_url(self) -> bool:
        return self.elsewhere_port is not None


_VLLM_HINT = "vLLM offers it when it is started with VLLM_SERVER_DEV_MODE=1 in its environment"
_SGLANG_HINT = "SGLang offers POST /flush_cache; where it has an admin key, give that as the API key"
_SGLANG = Preset((Call("POST", "/flush_cache"),), _SGLANG_HINT, busy=frozenset({400}))

PRESETS: Mapping[str, Preset] = {
    "vllm": Preset((Call("POST", "/reset_prefix_cache"),), _VLLM_HINT),
    "vllm+connector": Preset((Call("POST", "/reset_prefix_cache?reset_external=true"),), _VLLM_HINT),
    "sglang": _SGLANG,
    "llamacpp": Preset(
        (Call("POST", "/slots/{slot}?action=erase"),),
        "llama.cpp offers it with --slots and --slot-save-path; --cache-ram 0 keeps it from a second cache that no "
        "call empties",
    ),
    "lmcache": Preset(
        (Call("DELETE", "/cache/clear", elsewhere=True), Call("POST", "/reset_prefix_cache")),
        f"LMCache offers it with internal_api_server_enabled: true, by default at port 7000 (--reset-url names "
        f"another); {_VLLM_HINT}",
        elsewhere_port=7000,
    ),
    "akv": _SGLANG,
}
