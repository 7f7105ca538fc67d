"""Exact prefix caches with their KV: vLLM's chained blocks and SGLang's radix tree (lookup `vllm-prefix`,
`sglang-prefix`).

The rules are those that `kvaudit.preflight.prefix_caches` counts by, where their sources stand; prompts only are kept,
answers not. A hit never covers a prompt's last token. A prompt that is larger than the whole cache, which such a server
would refuse, is computed without reuse and not kept. Keys are kept as they are turned: a prefix never moves.

One write in the ledger is what one prompt added; a block or a tail of it that is evicted names that write.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from torch import Tensor

from kvaudit.engines import Lookup
from kvaudit.engines.embedded.cache import Entry, Ledger, PromptBytes, context_hash
from kvaudit.errors import UsageError
from kvaudit.records import Part, Prompt, Write

VLLM_BLOCK = 16
"""Tokens of a block, vLLM's default."""
ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """The write that brought a piece of a prefix, and whose it was."""

    write: Write
    request_id: str
    part: Part


@dataclass(slots=True, eq=False)
class Piece:
    """Turned keys and values [L, 2, G, tokens, D] of neighbouring positions of a prefix."""

    states: Tensor
    origin: Origin

    @property
    def tokens(self) -> int:
        return self.states.shape[3]

    @property
    def size_bytes(self) -> int:
        return self.states.numel() * self.states.element_size()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached pieces, from position 0 on, with which a prompt (`token_ids`, int32) begins."""

    token_ids: bytes
    pieces: tuple[Piece, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    def load(self, arena: Tensor) -> None:
        """Copy the prefix to the beginning of an arena [L, 2, G, capacity, D]."""
        position = 0
        for piece in self.pieces:
            arena[:, :, :, position : position + piece.tokens] = piece.states
            position += piece.tokens

    def entries(self, prompt: Prompt, seen: PromptBytes) -> tuple[Entry | None, ...]:
        """Per segment, the write that brought the last of its tokens that was hit; None for one that was not hit."""
        return tuple(
            self._entry(segment.start, segment.end, segment.content_id, context, seen)
            for segment, context in zip(prompt.segments, seen.contexts, strict=True)
        )

    def _entry(self, start: int, end: int, content_id: str, context: str, seen: PromptBytes) -> Entry | None:
        position, last = 0, None
        for piece in self.pieces:
            if position < end and start < position + piece.tokens:
                last = piece
            position += piece.tokens
        if last is None:
            return None
        origin = last.origin
        write = replace(origin.write, content_id=content_id, position=start, context_hash=context)
        return Entry((seen.chunk(start, end), context), last.states, write, origin.request_id, origin.part)


class PrefixCache(Ledger):
    """`capacity` in tokens, None is no limit."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__()
        self._capacity = capacity

    @abstractmethod
    def match(self, token_ids: bytes) -> PrefixHit:
        """What is cached of a prompt (int32 ids) without its last token."""

    @abstractmethod
    def add(self, hit: PrefixHit, states: Tensor, request_id: str, part: Part) -> None:
        """Keep a prompt, the last that was matched, whose turned keys and values `states` [L, 2, G, n, D] begin with;
        what was hit of it becomes the most recently used."""

    def _fits(self, token_ids: bytes) -> bool:
        return self._capacity is None or len(token_ids) // ID_BYTES <= self._capacity

    def _write(self, hit: PrefixHit, start: int, states: Tensor) -> Write:
        """Note that the prompt's positions from `start` on, `states`, were written over what was hit."""
        token_ids, stop = hit.token_ids, start + states.shape[3]
        over = dict.fromkeys(piece.origin.write.write_ordinal for piece in hit.pieces)
        write = Write(
            context_hash(sha256(token_ids[start * ID_BYTES : stop * ID_BYTES])),
            self._ordinal,
            start,
            stop - start,
            context_hash(sha256(token_ids[: start * ID_BYTES])),
            tuple(over),
            states.numel() * states.element_size(),
        )
        self._wrote(write)
        return write


@dataclass(slots=True, eq=False)
class _Block:
    key: bytes
    piece: Piece


class BlockCache(PrefixCache):
    """vLLM: a full block is known by its tokens and all before it. Equal blocks are not merged, the first is hit.

    Blocks wait in `_queue` in the order in which they are taken for new ones; `_blank` counts those in front that hold
    nothing. With no limit none is ever taken, and a second equal block, which would never be hit, is not kept.
    """

    def __init__(self, capacity: int | None = None, block_tokens: int = VLLM_BLOCK) -> None:
        super().__init__(capacity)
        self._size = None if capacity is None else capacity // block_tokens - 1  # one block of vLLM's holds no tokens
        if self._size is not None and self._size < 1:
            raise UsageError(
                f"a cache of {capacity:,} tokens holds no block", f"give it room for {2 * block_tokens} tokens or more"
            )
        self._block_tokens = block_tokens
        self.clear()

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> None:
        self._forget()
        self._known: dict[bytes, list[_Block]] = {}
        self._queue: OrderedDict[_Block, None] = OrderedDict()
        self._blank = self._size or 0

    def match(self, token_ids: bytes) -> PrefixHit:
        return PrefixHit(token_ids, tuple(block.piece for block in self._hit(token_ids, self._keys(token_ids))))

    def add(self, hit: PrefixHit, states: Tensor, request_id: str, part: Part) -> None:
        token_ids = hit.token_ids
        if not self._fits(token_ids):
            return
        keys = self._keys(token_ids)
        held = self._hit(token_ids, keys)
        for block in held:
            del self._queue[block]
        needed = -(-len(token_ids) // (ID_BYTES * self._block_tokens)) - len(held)
        if self._size is not None:
            self._take(needed)
            self._blank += needed - (len(keys) - len(held))
        new = keys[len(held) :] if self._size is not None else [key for key in keys if key not in self._known]
        made = self._made(new, len(keys) - len(new), hit, states, request_id, part)
        self._queue.update(dict.fromkeys(reversed([*held, *made])))

    def _fits(self, token_ids: bytes) -> bool:
        return self._size is None or -(-len(token_ids) // (ID_BYTES * self._block_tokens)) <= self._size

    def _hit(self, token_ids: bytes, keys: Sequence[bytes]) -> list[_Block]:
        if not self._fits(token_ids):
            return []
        hit = []
        for key in keys[: (len(token_ids) // ID_BYTES - 1) // self._block_tokens]:
            if key not in self._known:
                break
            hit.append(self._known[key][0])
        return hit

    def _keys(self, token_ids: bytes) -> list[bytes]:
        """Chained hashes of the full blocks."""
        seen, step, keys = sha256(), ID_BYTES * self._block_tokens, []
        for end in range(step, len(token_ids) + 1, step):
            seen.update(token_ids[end - step : end])
            keys.append(seen.digest())
        return keys

    def _made(
        self, keys: Sequence[bytes], first: int, hit: PrefixHit, states: Tensor, request_id: str, part: Part
    ) -> list[_Block]:
        """New blocks, the `first` of the prompt's and those after it."""
        if not keys:
            return []
        size = self._block_tokens
        start, stop = first * size, (first + len(keys)) * size
        origin = Origin(self._write(hit, start, states[:, :, :, start:stop]), request_id, part)
        made = [
            _Block(key, Piece(states[:, :, :, at : at + size].clone(), origin))
            for key, at in zip(keys, range(start, stop, size), strict=True)
        ]
        for block in made:
            self._known.setdefault(block.key, []).append(block)
        return made

    def _take(self, count: int) -> None:
        blank = min(count, self._blank)
        self._blank -= blank
        for _ in range(count - blank):
            block, _ = self._queue.popitem(last=False)
            equal = self._known[block.key]
            equal.remove(block)
            if not equal:
                del self._known[block.key]
            self._evicted(block.piece.origin.write, block.piece.size_bytes)


@dataclass(slots=True, eq=False)
class _Node:
    """`key`: the token ids on the edge to it, `piece` their KV (None at the root)."""

    key: bytes
    parent: _Node | None
    piece: Piece | None
    used: int
    children: dict[bytes, _Node] = field(default_factory=dict)


class RadixCache(PrefixCache):
    """SGLang: a tree over token ids, page size 1. Room is made leaf by leaf, the least recently used first."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.clear()

    def __len__(self) -> int:
        return sum(1 for _ in self._below(self._root))

    def clear(self) -> None:
        self._forget()
        self._root = _Node(b"", None, None, 0)
        self._clock = self._kept = 0

    def match(self, token_ids: bytes) -> PrefixHit:
        if not self._fits(token_ids):
            return PrefixHit(token_ids)
        return PrefixHit(token_ids, tuple(self._path(self._walk(token_ids[:-ID_BYTES]))))

    def add(self, hit: PrefixHit, states: Tensor, request_id: str, part: Part) -> None:
        token_ids = hit.token_ids
        if not self._fits(token_ids):
            return
        tokens = len(token_ids) // ID_BYTES
        self._make_room(tokens - hit.tokens)
        node = self._walk(token_ids)
        kept = sum(piece.tokens for piece in self._path(node))
        if kept == tokens:
            return
        tail = states[:, :, :, kept:tokens].clone()
        piece = Piece(tail, Origin(self._write(hit, kept, tail), request_id, part))
        self._attach(node, token_ids[kept * ID_BYTES :], piece)
        self._kept += tokens - kept

    def _walk(self, token_ids: bytes) -> _Node:
        """The node where the longest match ends (split there)."""
        self._clock += 1
        node, position = self._root, 0
        while position < len(token_ids):
            child = node.children.get(token_ids[position : position + ID_BYTES])
            if child is None:
                break
            child.used = self._clock
            common = _common(child.key, token_ids[position : position + len(child.key)])
            if common < len(child.key):
                return self._split(child, common)
            node, position = child, position + common
        return node

    def _split(self, lower: _Node, length: int) -> _Node:
        assert lower.parent is not None
        assert lower.piece is not None
        cut, whole = length // ID_BYTES, lower.piece
        head, tail = whole.states[:, :, :, :cut].clone(), whole.states[:, :, :, cut:].clone()
        upper = self._attach(lower.parent, lower.key[:length], Piece(head, whole.origin))
        lower.key, lower.parent, lower.piece = lower.key[length:], upper, Piece(tail, whole.origin)
        upper.children[lower.key[:ID_BYTES]] = lower
        return upper

    def _attach(self, parent: _Node, key: bytes, piece: Piece) -> _Node:
        node = _Node(key, parent, piece, self._clock)
        parent.children[key[:ID_BYTES]] = node
        return node

    def _path(self, node: _Node | None) -> list[Piece]:
        """The pieces from the root to a node."""
        pieces = []
        while node is not None and node.piece is not None:
            pieces.append(node.piece)
            node = node.parent
        return pieces[::-1]

    def _make_room(self, tokens: int) -> None:
        """What was hit was used last, so that a prompt that fits never takes its room."""
        if self._capacity is None:
            return
        while tokens > self._capacity - self._kept:
            leaves = (node for node in self._below(self._root) if not node.children)
            self._evict(min(leaves, key=lambda node: node.used))

    def _evict(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        assert leaf.piece is not None
        del leaf.parent.children[leaf.key[:ID_BYTES]]
        self._kept -= leaf.piece.tokens
        self._evicted(leaf.piece.origin.write, leaf.piece.size_bytes)

    def _below(self, node: _Node) -> Iterator[_Node]:
        waiting = list(node.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


def prefix_cache(lookup: Lookup, capacity_bytes: int | None, token_bytes: int) -> PrefixCache:
    """An empty cache for a prefix lookup. Raises UsageError for a capacity that cannot hold anything."""
    capacity = None if capacity_bytes is None else capacity_bytes // token_bytes
    if capacity == 0:
        raise UsageError(
            f"a cache of {capacity_bytes:,} bytes holds no token of {token_bytes:,} bytes", "give it a larger capacity"
        )
    return BlockCache(capacity) if lookup == "vllm-prefix" else RadixCache(capacity)


def _common(left: bytes, right: bytes) -> int:
    """Bytes, in whole tokens, that two runs of token ids have in common from their start."""
    if left.startswith(right):
        return len(right)
    return next(at for at in range(0, len(right), ID_BYTES) if left[at : at + ID_BYTES] != right[at : at + ID_BYTES])
