"""Prefix caches written the slow way, from their published rules: lists and dictionaries of whole prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Block:
    prefix: Tokens | None = None
    born: int = 0


class SlowBlocks:
    """vLLM: every block of the pool is an object in a list, in the order in which it would be taken."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.free = [Block() for _ in range(blocks - 1)]
        self.block_tokens = block_tokens
        self.births = 0

    def serve(self, prompt: Sequence[int]) -> int | None:
        size = self.block_tokens
        prefixes = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        mine: list[Block] = []
        for prefix in prefixes[: (len(prompt) - 1) // size]:
            same = [block for block in self.free if block.prefix == prefix]
            if not same:
                break
            mine.append(min(same, key=lambda block: block.born))
        needed = -(-len(prompt) // size) - len(mine)
        if needed > len(self.free) - len(mine):
            return None
        hits = len(mine)
        self.free = [block for block in self.free if block not in mine]
        mine += self.free[:needed]
        self.free = self.free[needed:]
        for index, block in enumerate(mine[hits:], start=hits):
            self.births += 1
            block.prefix, block.born = (prefixes[index] if index < len(prefixes) else None), self.births
        done = list(reversed(mine))
        self.free = [b for b in done if b.prefix is None] + self.free + [b for b in done if b.prefix is not None]
        return hits * size


class SlowRadix:
    """SGLang: each node is the prefix at which it ends, with the time of its last use."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.nodes: dict[Tokens, int] = {}
        self.now = 0

    def parent(self, node: Tokens) -> Tokens:
        shorter = [other for other in self.nodes if len(other) < len(node) and node[: len(other)] == other]
        return max(shorter, key=len, default=())

    def walk(self, prompt: Tokens) -> Tokens:
        self.now += 1
        at: Tokens = ()
        while len(at) < len(prompt):
            below = [n for n in self.nodes if self.parent(n) == at and n[: len(at) + 1] == prompt[: len(at) + 1]]
            if not below:
                break
            node = below[0]
            self.nodes[node] = self.now
            common = next((i for i, (a, b) in enumerate(zip(node, prompt, strict=False)) if a != b), None)
            common = min(len(node), len(prompt)) if common is None else common
            at = node[:common]
            if common < len(node):
                self.nodes[at] = self.now
                break
        return at

    def serve(self, prompt: Tokens) -> int | None:
        if self.capacity is not None and len(prompt) > self.capacity:
            return None
        hit = self.walk(prompt[:-1])
        if self.capacity is not None:
            kept = {node[:end] for node in self.nodes for end in range(1, len(node) + 1)}
            self.make_room(hit, len(prompt) - len(hit) - (self.capacity - len(kept)))
        self.walk(prompt)
        self.nodes[prompt] = self.now
        return len(hit)

    def make_room(self, hit: Tokens, shortfall: int) -> None:
        while shortfall > 0:
            parents = {self.parent(node) for node in self.nodes}
            leaves = [n for n in self.nodes if n not in parents and hit[: len(n)] != n]
            if not leaves:
                return
            oldest = min(leaves, key=lambda node: self.nodes[node])
            shortfall -= len(oldest) - len(self.parent(oldest))
            del self.nodes[oldest]
