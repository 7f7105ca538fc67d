"""What exact prefix caches could reuse of requests that are known by lengths and hashes of their blocks only.

What stands at another position, under another prefix, has another hash: reuse of chunks cannot be seen.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvaudit.preflight.common import common_start
from kvaudit.preflight.inspection import HashedFacts, Inspection, Named
from kvaudit.preflight.prefix_caches import BlockPrefixCache, Hit, RadixPrefixCache
from kvaudit.preflight.reuse import Break, Caches, RequestReuse
from kvaudit.records import HashedRequest

BLOCK = "block"
"""The kind of what breaks a prefix here, as segments have theirs."""

BlockIds = tuple[int | str, ...]


class _Known(NamedTuple):
    numbers: dict[tuple[int, int | str], int]
    """By the number of the block before and the block's id."""
    after: dict[int | str, int]
    """The number before a block's first occurrence."""


class BlockNumbers:
    """One number for each block together with all before it, the same for the same ids in the same order.

    Requests of one local namespace come together: it is forgotten behind them. The global one, whose name is empty, is
    not.
    """

    def __init__(self) -> None:
        self._namespace = ""
        self._global = _Known({}, {})
        self._known, self._after = self._global
        self._latest: tuple[BlockIds, array[int]] = ((), array("I"))
        self.distinct = 0
        self.moved = 0
        """Blocks whose id came before under another prefix, which a hash of the prefix never does."""

    def of(self, namespace: str, ids: BlockIds) -> array[int]:
        if namespace != self._namespace:
            self._namespace = namespace
            self._known, self._after = _Known({}, {}) if namespace else self._global
            self._latest = ((), array("I"))
        before, numbered = self._latest
        same = common_start(before, ids)
        numbers = numbered[:same]
        parent = numbers[-1] if same else -1
        for block in ids[same:]:
            number = self._known.get((parent, block))
            if number is None:
                number = self._known[parent, block] = self.distinct
                self.distinct += 1
                self.moved += self._after.setdefault(block, parent) != parent
            numbers.append(number)
            parent = number
        self._latest = (ids, numbers)
        return numbers


def inspect_hashes(
    requests: Iterable[HashedRequest], caches: Caches, each: Callable[[RequestReuse], None] = lambda row: None
) -> Inspection:
    """Inspect requests as they come; `each` is given every request's row. Blocks and pages are what an id stands for.

    Raises UsageError for caches that hold no block, and what reading the trace raises.
    """
    inspector = _Inspector(caches)
    for request in requests:
        each(inspector.add(request))
    return inspector.finished()


class _Inspector:
    def __init__(self, caches: Caches) -> None:
        self._size = caches.block_tokens
        self._facts = HashedFacts()
        self._found = Inspection(caches, hashed=self._facts)
        self._numbers = BlockNumbers()
        self._vllm = BlockPrefixCache(caches.capacity, self._size)
        self._sglang = RadixPrefixCache(caches.capacity, self._size, ids_a_page=1)

    def add(self, request: HashedRequest) -> RequestReuse:
        found, facts, tokens = self._found, self._facts, request.prompt_tokens
        full = tokens // self._size
        numbers = self._numbers.of(request.namespace, request.block_ids[:full])
        hit = self._sglang.serve_pages(numbers.tobytes(), tokens, request.request_id)
        row = RequestReuse(
            request_id=request.request_id,
            ordinal=request.ordinal,
            session=request.session,
            segments=None,
            prompt_tokens=tokens,
            prelude_tokens=0,
            vllm_reused=self._vllm.serve_blocks(numbers, tokens),
            sglang_reused=None if hit is None else hit.reused,
            chunk_reused_any=None,
            chunk_reused_stop_at_miss=None,
            broken=_break(hit, self._size),
        )
        found.requests += 1
        found.totals.add(row)
        if request.session:
            found.sessions.add(request.session)
        facts.blocks += len(numbers)
        facts.answer_tokens += request.answer_tokens
        self._compare_length(request, full)
        return row

    def _compare_length(self, request: HashedRequest, full: int) -> None:
        given, place = len(request.block_ids), request.request_id
        if given > -(-request.prompt_tokens // self._size):
            self._facts.too_many_ids.add(place)
        elif given < full:
            self._facts.too_few_ids.add(place)
            self._facts.unnamed_tokens += (full - given) * self._size

    def finished(self) -> Inspection:
        self._facts.distinct_blocks, self._facts.moved_blocks = self._numbers.distinct, self._numbers.moved
        return self._found


def _break(hit: Hit | None, size: int) -> Break | None:
    if hit is None or hit.how == "whole":
        return None
    return Break(hit.reused // size + 1, BLOCK, hit.reused, hit.how, hit.writer)


def limits(inspection: Inspection, hashes: str, remedy: str) -> list[str]:
    """What such a trace cannot show and why, and what in it is not as its format says, as sentences.

    `hashes` names the format; `remedy` ends a sentence on numbers of ids that do not fit the size of a block.
    """
    facts = inspection.hashed
    assert facts is not None
    size = inspection.caches.block_tokens
    told = [
        "no answer can be audited: a model is asked with prompts, and the trace holds only their lengths and hashes",
        _positions(facts, hashes),
        "what paying a recompute ratio would save is not counted: it is paid for chunks, an exact prefix needs none",
    ]
    if facts.too_many_ids.count:
        told.append(
            f"{_requests(facts.too_many_ids)} more ids than blocks of {size:,} tokens; the surplus is not "
            f"counted{remedy}"
        )
    if facts.too_few_ids.count:
        told.append(
            f"{_requests(facts.too_few_ids)} fewer ids than full blocks of {size:,} tokens; the tokens in blocks "
            f"without an id, {facts.unnamed_tokens:,}, count as computed{remedy}"
        )
    return told


def _positions(facts: HashedFacts, hashes: str) -> str:
    unseen = "segments, findings on texts and reuse at other positions cannot be seen"
    if not facts.moved_blocks:
        return f"{unseen}: a hash stands for a block and all before it, so the same text elsewhere has another hash"
    return (
        f"{unseen}: {facts.moved_blocks:,} blocks have an id that came before under another prefix, so that ids do not "
        f"stand for whole prefixes as they should in a {hashes} trace; a prefix is told by all its ids in order, and "
        "equal blocks at other positions are not counted"
    )


def _requests(named: Named) -> str:
    """The subject of a sentence and its verb."""
    if named.count == 1:
        return f"request {named.first!r} has"
    return f"{named.count:,} requests (first {named.first!r}) have"
