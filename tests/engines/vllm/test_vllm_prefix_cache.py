"""The engine `vllm` looks after vLLM's reset at every emptying, the first one too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvaudit.engines import EngineSettings
from kvaudit.engines.vllm.engine import VllmEngine
from kvaudit.errors import EngineError


class Caching:
    """Stands for vLLM: blocks of four tokens that are found again, and faults that can be planted."""

    block_size = 4

    def __init__(self, *, clears=True, caches=True):
        self.clears, self.caches = clears, caches
        self.held = set()

    def ask(self, token_ids, max_tokens, ended, *rest):
        block = token_ids[: self.block_size]
        found = block in self.held
        if self.caches:
            self.held.add(block)
        return SimpleNamespace(cached_tokens=self.block_size if found else 0)

    def reset_prefix_cache(self):
        if self.clears:
            self.held.clear()
        return self.clears is not None


def opened(running, length=64, *, prefix_caching=True):
    place = SimpleNamespace(vocabulary=100, max_model_len=length)
    return VllmEngine(running, place, EngineSettings(), prefix_caching=prefix_caching)


def test_an_emptied_cache_is_seen_to_be_empty():
    engine = opened(running := Caching())
    assert [engine.reset().entries for _ in range(3)] == [0, 0, 0]
    assert not running.held


def test_a_cache_that_is_not_emptied_is_seen_at_once():
    assert opened(Caching(clears=False)).reset().entries == 1
    engine = opened(running := Caching())
    engine.reset()
    running.clears = False
    assert engine.reset().entries == 1


def test_where_nothing_can_be_seen_nothing_is_claimed():
    assert opened(Caching(caches=False)).reset().entries is None
    assert opened(Caching(), length=5).reset().entries is None


def test_without_prefix_caching_there_is_nothing_to_empty():
    assert opened(Caching(clears=False), prefix_caching=False).reset().entries == 0


def test_a_reset_that_vllm_refuses_is_an_error():
    with pytest.raises(EngineError, match="did not empty"):
        opened(Caching(clears=None)).reset()
