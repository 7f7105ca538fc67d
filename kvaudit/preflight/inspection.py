"""A trace looked at request by request: counts, reuse, findings. Memory grows with distinct segments only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvaudit.engines import Tokenizer
from kvaudit.errors import KvauditError
from kvaudit.preflight.context import ContextLint
from kvaudit.preflight.findings import Finding, Findings, Place
from kvaudit.preflight.inside import InsideLint
from kvaudit.preflight.pieces import Piece, PiecedPrompt, PieceReader
from kvaudit.preflight.reuse import Caches, RequestReuse, ReuseAnalysis, ReuseTotals
from kvaudit.preflight.templates import Renderer, TemplateLint
from kvaudit.preflight.variants import VariantLint
from kvaudit.preflight.volatile import VolatileLint
from kvaudit.prompts import Prompts
from kvaudit.records import GLUE, Request


@dataclass(frozen=True, slots=True)
class Reading:
    """With what a trace is read. Without a tokenizer only token ids that the trace carries are counted.

    `renderer` is the model's chat template, `context_tokens` what the model takes of prompt and answer together.
    """

    tokenizer: Tokenizer | None
    renderer: Renderer | None = None
    context_tokens: int | None = None


@dataclass(slots=True)
class Named:
    """How many requests something is true of, and the first of them."""

    count: int = 0
    first: str = ""

    def add(self, request_id: str) -> None:
        self.first = self.first or request_id
        self.count += 1


@dataclass(slots=True)
class HashedFacts:
    """What a trace of lengths and hashes holds beside requests; blocks are full blocks that have an id.

    `moved_blocks` have an id that came before under another prefix, `unnamed_tokens` stand in full blocks without one.
    """

    blocks: int = 0
    distinct_blocks: int = 0
    moved_blocks: int = 0
    answer_tokens: int = 0
    unnamed_tokens: int = 0
    too_many_ids: Named = field(default_factory=Named)
    too_few_ids: Named = field(default_factory=Named)


@dataclass(slots=True)
class Inspection:
    """What a trace holds. `left_out` requests have no token ids and no tokenizer to make them.

    `hashed` is there for a trace without prompts: then there are no segments, chunks and findings.
    """

    caches: Caches
    totals: ReuseTotals = field(default_factory=ReuseTotals)
    kinds: Counter[str] = field(default_factory=Counter)
    kind_tokens: Counter[str] = field(default_factory=Counter)
    sessions: set[str] = field(default_factory=set)
    requests: int = 0
    chats: int = 0
    distinct_chunks: int = 0
    left_out: int = 0
    refused: int = 0
    unchecked_pairs: int = 0
    findings: list[Finding] = field(default_factory=list)
    hashed: HashedFacts | None = None

    @property
    def has_errors(self) -> bool:
        return any(finding.rule.severity == "error" for finding in self.findings)


def inspect(
    requests: Iterable[Request],
    reading: Reading,
    caches: Caches = Caches(),  # noqa: B008 - frozen
    each: Callable[[RequestReuse], None] = lambda row: None,
) -> Inspection:
    """Inspect requests as they come; `each` is given every request's row. Raises what reading the trace raises."""
    inspector = _Inspector(reading, caches, each)
    for request in requests:
        inspector.add(request)
    return inspector.finished()


class _Inspector:
    def __init__(self, reading: Reading, caches: Caches, each: Callable[[RequestReuse], None]) -> None:
        self._reading, self._each = reading, each
        self._found = Inspection(caches)
        self._findings = Findings()
        tokenizer = reading.tokenizer or _NoTokenizer()
        self._pieces = PieceReader(Prompts(tokenizer), bool(tokenizer.leading_ids))
        self._reuse = ReuseAnalysis(caches)
        self._context = ContextLint(tokenizer.encode, self._findings)
        self._volatile = VolatileLint(self._findings)
        self._variants = VariantLint(self._findings)
        self._inside = InsideLint(self._findings)
        self._templates = reading.renderer and TemplateLint(reading.renderer, tokenizer.encode, self._findings)
        self._occurrences: Counter[Piece] = Counter()

    def add(self, request: Request) -> None:
        found = self._found
        found.requests += 1
        found.chats += request.chat
        if request.session:
            found.sessions.add(request.session)
        if self._reading.tokenizer is None and not carries_ids(request):
            found.left_out += 1
            return
        try:
            prompt = self._pieces.request(request)
            prelude = list(self._pieces.prelude(request))
        except KvauditError as error:
            found.refused += 1
            place = Place(request.request_id, request.ordinal)
            what = error.message
            self._findings.add("refused", what.replace(repr(request.request_id), ""), place, 0, what)
            return
        row = self._reuse.serve(request, prompt, prelude)
        found.totals.add(row)
        self._each(row)
        self._occurrences.update(prompt.pieces)
        self._lint(request, prompt)
        lengths = [(sum(piece.tokens for piece in before.pieces), 0) for before in prelude]
        self._measure(request, [(row.prompt_tokens, request.max_tokens), *lengths])

    def _lint(self, request: Request, prompt: PiecedPrompt) -> None:
        self._context.add(request, prompt)
        self._volatile.add(request, prompt)
        self._variants.add(request, prompt)
        self._inside.add(request, prompt)
        if self._templates and request.chat:
            self._templates.add(request, prompt)

    def _measure(self, request: Request, lengths: Sequence[tuple[int, int]]) -> None:
        """Find prompts that, with their answers, are longer than the model's context."""
        limit = self._reading.context_tokens
        for tokens, answer in lengths:
            if limit is not None and tokens + answer > limit:
                what = f"a prompt of {tokens:,} tokens and {answer:,} to answer; the model takes {limit:,}"
                place = Place(request.request_id, request.ordinal)
                self._findings.add("beyond-context", None, place, tokens, what)

    def finished(self) -> Inspection:
        found, totals = self._found, self._found.totals
        for piece, count in self._occurrences.items():
            found.kinds[piece.kind] += count
            found.kind_tokens[piece.kind] += count * piece.tokens
        found.distinct_chunks = len({piece.content_id for piece in self._occurrences if piece.is_chunk})
        found.unchecked_pairs = self._context.unchecked
        first = Place("", 0)
        if totals.requests and not totals.chunk_reused_any:
            what = f"none of {totals.requests:,} requests has a segment that an earlier one had"
            self._findings.add("nothing-reused", None, first, totals.prompt_tokens, what)
        elif totals.requests and not totals.chunk_reused_stop_at_miss:
            what = "in every request the first segment is new, and the lookup stops there (the default, as LMCache's)"
            self._findings.add("nothing-before-a-miss", None, first, totals.chunk_reused_any, what)
        if found.chats and totals.chunk_reused_any and (glue := found.kind_tokens[GLUE]):
            what = f"{found.chats:,} of {found.requests:,} requests are chats, with messages as chunks that recur"
            self._findings.add("chat-preset", None, first, glue, what)
        self._inside.finish()
        found.findings = self._findings.ranked()
        return found


def carries_ids(request: Request) -> bool:
    """Whether every prompt of a request comes with its token ids."""
    prompts = (request.segments, *request.prelude)
    return not request.chat and all(segment.token_ids is not None for prompt in prompts for segment in prompt)


class _NoTokenizer:
    """Stands where only carried token ids are read, and refuses everything else."""

    digest = ""
    leading_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a text without a tokenizer")

    def decode(self, token_ids: object) -> str:
        raise AssertionError("token ids without a tokenizer")

    def chat(self, messages: object) -> list[tuple[int | None, str]]:
        raise AssertionError("a chat without a tokenizer")
