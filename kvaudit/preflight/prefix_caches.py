"""What an exact prefix cache would have reused: vLLM's chained blocks and SGLang's radix tree, without a model.

Both serve one prompt at a time to its end, prompts only: answers would take room that their lengths do not tell.

vLLM (0.33.0: `v1/core/kv_cache_utils.py`, `block_pool.py`, `kv_cache_manager.py`, and the design page "Automatic
Prefix Caching"). A full block of 16 tokens is known by the hash of its parent's hash, its token ids and extra keys.
The hit is the longest run of known blocks from the start that leaves at least the last token to compute. Blocks that
are in no use wait in a queue: those without a hash at its front, the others at its end, a request's last block first.
New blocks come from the front, and what they held is forgotten. Equal blocks are not merged.

SGLang (0.5.23: `srt/mem_cache/radix_cache.py`, `managers/schedule_batch.py`). A radix tree over token ids; the hit is
the longest match with all tokens but the last. Room is made for what is short, leaf by leaf, the least recently used
first, each leaf as a whole.

Token ids come as 32-bit integers in `bytes`. Where a trace has names of blocks in place of token ids, a block is a page
of the radix tree. Capacities count tokens, None is no limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Literal

from kvaudit.errors import UsageError
from kvaudit.preflight.common import common_start

VLLM_BLOCK = 16
ID_BYTES = 4
_DIGEST = 16

How = Literal["whole", "empty", "differs", "extends", "evicted"]
"""Why a hit ends: with all tokens but the last, which is always computed (`whole`); nothing was cached (`empty`);
what was cached goes on with other tokens (`differs`); it ends where an earlier prompt ended (`extends`), or where what
went on was evicted (`evicted`)."""


class BlockPrefixCache:
    """vLLM's prefix cache. `capacity` is what vLLM calls its KV cache size; one block of it holds no tokens."""

    def __init__(self, capacity: int | None = None, block_tokens: int = VLLM_BLOCK) -> None:
        blocks = None if capacity is None else capacity // block_tokens - 1
        if blocks is not None and blocks < 1:
            raise UsageError(
                f"a cache of {capacity:,} tokens holds no block", f"give it at least {2 * block_tokens} tokens"
            )
        self._block_tokens = block_tokens
        self._size, self._blank = blocks, blocks or 0
        self._blocks: dict[Hashable, int] = {}
        self._copies: dict[Hashable, list[int]] = {}
        self._queue: OrderedDict[int, Hashable] = OrderedDict()
        self._next = 0

    def serve(self, token_ids: bytes) -> int | None:
        """Tokens of the prompt that were cached before it came; None for one that the cache cannot hold."""
        return self.serve_blocks(self._hashes(token_ids), len(token_ids) // ID_BYTES)

    def serve_blocks(self, hashes: Sequence[Hashable], tokens: int) -> int | None:
        """As `serve`, from what names each full block and all before it; full blocks at the end may have no name."""
        usable = hashes[: (tokens - 1) // self._block_tokens]
        hits = next((index for index, known in enumerate(usable) if known not in self._blocks), len(usable))
        if self._size is None:
            self._blocks.update(dict.fromkeys(hashes[hits:], 0))
        elif -(-tokens // self._block_tokens) > self._size:
            return None
        else:
            self._allocate(hashes, hits, -(-tokens // self._block_tokens))
        return hits * self._block_tokens

    def _hashes(self, token_ids: bytes) -> list[bytes]:
        """The chained hash of each full block. One model, one tenant: no extra keys."""
        step = ID_BYTES * self._block_tokens
        parent = bytes(_DIGEST)
        hashes = []
        for end in range(step, len(token_ids) + 1, step):
            parent = blake2b(parent + token_ids[end - step : end], digest_size=_DIGEST).digest()
            hashes.append(parent)
        return hashes

    def _allocate(self, hashes: Sequence[Hashable], hits: int, needed: int) -> None:
        """Hold the blocks that were hit, take others for the rest of the prompt, and put them back when it is done."""
        held = [self._blocks[block_hash] for block_hash in hashes[:hits]]
        for block in held:
            del self._queue[block]
        self._take(needed - hits)
        new = range(self._next, self._next + len(hashes) - hits)
        self._next = new.stop
        for block, block_hash in zip(new, hashes[hits:], strict=True):
            if self._blocks.setdefault(block_hash, block) != block:
                self._copies.setdefault(block_hash, []).append(block)
        self._blank += needed - len(hashes)
        self._queue.update(zip(reversed([*held, *new]), reversed(hashes), strict=True))

    def _take(self, count: int) -> None:
        blank = min(count, self._blank)
        self._blank -= blank
        for _ in range(count - blank):
            block, block_hash = self._queue.popitem(last=False)
            if block_hash in self._copies:
                self._forget_copy(block, block_hash)
            else:
                del self._blocks[block_hash]

    def _forget_copy(self, block: int, block_hash: Hashable) -> None:
        """Of equal blocks the one that came first is hit."""
        copies = self._copies[block_hash]
        if self._blocks[block_hash] == block:
            self._blocks[block_hash] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[block_hash]


@dataclass(slots=True, eq=False)
class _Node:
    """`key`: the ids on the edge to it. `cut`: something that went on here was evicted."""

    key: bytes
    parent: _Node | None
    writer: str
    used: int
    children: dict[bytes, _Node] = field(default_factory=dict)
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """`reused` tokens of a prompt were loaded; `writer` is the request that brought the last of them."""

    reused: int
    writer: str | None
    how: How


class RadixPrefixCache:
    """SGLang's radix cache. With `page_tokens` above 1 whole pages are matched and kept.

    `ids_a_page`: 32-bit integers that name a page. Its token ids name it, or 1 is its number.
    """

    def __init__(self, capacity: int | None = None, page_tokens: int = 1, ids_a_page: int | None = None) -> None:
        if capacity is not None and capacity < page_tokens:
            raise UsageError(f"a cache of {capacity:,} tokens holds no page", f"give it at least {page_tokens} tokens")
        self._capacity = capacity
        self._page_tokens = page_tokens
        self._page = (ids_a_page or page_tokens) * ID_BYTES
        self._root = _Node(b"", None, "", 0)
        self._clock = 0
        self._kept = 0
        self._leaves: list[tuple[int, int, _Node]] = []
        self._pushed = 0

    @property
    def tokens(self) -> int:
        """Tokens in the tree."""
        return self._kept

    def serve(self, token_ids: bytes, writer: str) -> Hit | None:
        """What was cached of the prompt before it came; None for one that the cache cannot hold."""
        return self.serve_pages(token_ids, len(token_ids) // ID_BYTES, writer)

    def serve_pages(self, page_ids: bytes, tokens: int, writer: str) -> Hit | None:
        """As `serve`, from what names each page; what is too short for a page is left out."""
        if self._capacity is not None and tokens > self._capacity:
            return None
        whole = len(page_ids) // self._page * self._page
        usable = min(whole, (tokens - 1) // self._page_tokens * self._page)
        node, reused, how = self._walk(page_ids, usable)
        hit = Hit(self._tokens(reused), node.writer if reused else None, "whole" if reused == usable else how)
        self._make_room(tokens - hit.reused)
        node, kept, _ = self._walk(page_ids, whole)
        if kept < whole:
            self._add_leaf(node, page_ids[kept:whole], writer)
        return hit

    def _tokens(self, length: int) -> int:
        return length // self._page * self._page_tokens

    def _walk(self, token_ids: bytes, end: int) -> tuple[_Node, int, How]:
        """The node where the longest match within `end` bytes ends (split there), its length, and why it ends."""
        self._clock += 1
        node, position = self._root, 0
        while position < end:
            child = node.children.get(token_ids[position : position + self._page])
            if child is None:
                return node, position, self._end_of(node)
            child.used = self._clock
            length = len(child.key)
            common = min(self._common(child.key, token_ids, position), end - position)
            position += common
            if common < length:
                return self._split(child, common), position, "differs"
            self._offer(child)
            node = child
        return node, position, "whole"

    def _end_of(self, node: _Node) -> How:
        if node.children:
            return "differs" if node is not self._root else "empty"
        if node.cut:
            return "evicted"
        return "empty" if node is self._root else "extends"

    def _common(self, key: bytes, token_ids: bytes, position: int) -> int:
        """Bytes, in whole pages, that an edge and the prompt have in common."""
        if token_ids.startswith(key, position):
            return len(key)
        return common_start(key, token_ids[position : position + len(key)]) // self._page * self._page

    def _split(self, child: _Node, length: int) -> _Node:
        parent = child.parent
        assert parent is not None
        upper = _Node(child.key[:length], parent, child.writer, self._clock)
        parent.children[upper.key[: self._page]] = upper
        child.key, child.parent = child.key[length:], upper
        upper.children[child.key[: self._page]] = child
        self._offer(child)
        return upper

    def _add_leaf(self, parent: _Node, key: bytes, writer: str) -> None:
        leaf = _Node(key, parent, writer, self._clock)
        parent.children[key[: self._page]] = leaf
        self._kept += self._tokens(len(key))
        self._offer(leaf)

    def _offer(self, node: _Node) -> None:
        """Put a leaf, as it was last used, among those that may be evicted."""
        if self._capacity is not None and not node.children:
            self._pushed += 1
            heappush(self._leaves, (node.used, self._pushed, node))

    def _make_room(self, needed: int) -> None:
        """Evict until `needed` tokens fit. What was hit was used last: a prompt that fits never takes its room."""
        if self._capacity is None:
            return
        shortfall = needed - (self._capacity - self._kept)
        while shortfall > 0 and self._leaves:
            used, _, node = heappop(self._leaves)
            if node.parent is not None and not node.children and node.used == used:
                shortfall -= self._tokens(len(node.key))
                self._evict(node)

    def _evict(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self._page]]
        self._kept -= self._tokens(len(node.key))
        node.parent, parent.cut = None, True
        if parent.parent is not None:
            self._offer(parent)
