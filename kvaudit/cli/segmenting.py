"""Segmenting on the command line: which strategies, with whose tokenizer, and what is said of what they did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.cli.recorded import say
from kvaudit.engines import DEFAULT_MODEL
from kvaudit.errors import UsageError
from kvaudit.reports.escape import visible
from kvaudit.segmenting.strategies import KNOWN, Strategy, parse_strategies

if TYPE_CHECKING:
    from kvaudit.models.tokenizer import ModelTokenizer
    from kvaudit.records import Request
    from kvaudit.segmenting.applying import Step

STRATEGIES_HEADER = "segments"
STEPS_HEADER = "segmenting"
_STRATEGIES = "\n".join(f"  {known.written + ':':<15} {known.summary}" for known in KNOWN)

NOTES = f"""\b
Segments decide what can be reused. Strategies (--segment) are applied in the order in
which they are given, each to the segments that the ones before it left:
{_STRATEGIES}
Texts are never changed: the segments of a message, joined, are the message. White space
alone is a separator. What is cut out of an instruction, a query or a message is a
document; what is left keeps its kind. Of what a user sends in several parts (part),
the last part is the query (a message, in earlier turns), the parts before it are
documents. Traces of kvaudit's own can be cut again.
"""

SegmentOption = Annotated[
    list[str] | None,
    typer.Option(
        "--segment",
        metavar="STRATEGY",
        help="How prompts fall into segments; may be given again. [default: message; a trace of kvaudit's own as it "
        "is]",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help=f"Whose tokenizer cuts (tokens:N, auto) and counts. [default: {DEFAULT_MODEL}]"
    ),
]


class Segmenting:
    """How one command cuts prompts. Without strategies everything stays as it is read."""

    def __init__(self, written: Sequence[str], model: str | None) -> None:
        """Raises UsageError for a strategy that is unknown or has a wrong argument."""
        self._strategies: tuple[Strategy, ...] = parse_strategies(written)
        self._tokenizer = _LateTokenizer(model or DEFAULT_MODEL)
        self._steps: tuple[Step, ...] = ()

    @property
    def keeps_parts(self) -> bool:
        """Whether the log is to be read with the parts of contents apart."""
        return any(strategy.known.reads_parts for strategy in self._strategies)

    @property
    def reads_tokens(self) -> bool:
        return any(strategy.known.reads_tokens for strategy in self._strategies)

    def apply(
        self, requests: Sequence[Request], header: Mapping[str, object]
    ) -> tuple[Sequence[Request], Mapping[str, object]]:
        """The requests as they are cut, and the header with what was done, behind what had been done before."""
        if not self._strategies:
            return requests, header
        from kvaudit.segmenting.applying import segment_requests

        segmented = segment_requests(requests, self._strategies, self._tokenizer)
        self._steps = segmented.steps
        steps = [
            step.as_data() | (self._tokenizer.as_data() if strategy.known.reads_tokens else {})
            for step, strategy in zip(self._steps, self._strategies, strict=True)
        ]
        written = [step.strategy for step in self._steps]
        return segmented.requests, {
            **header,
            STRATEGIES_HEADER: [*_done_before(header, STRATEGIES_HEADER), *written],
            STEPS_HEADER: [*_done_before(header, STEPS_HEADER), *steps],
        }

    def say(self) -> None:
        for step in self._steps:
            say(visible(step.sentence()))


def _done_before(header: Mapping[str, object], name: str) -> list[object]:
    before = header.get(name)
    return before if isinstance(before, list) else []


class _LateTokenizer:
    """A model's tokenizer, opened for the first text: what carries its token ids needs none."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._opened: ModelTokenizer | None = None

    def offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        if self._opened is None:
            from kvaudit.models.reading import open_tokenizer

            self._opened = open_tokenizer(self._model).tokenizer
        return self._opened.offsets(text)

    def as_data(self) -> dict[str, object]:
        """Nothing where no text was read."""
        return {"tokenizer": self._model, "tokenizer_digest": self._opened.digest} if self._opened else {}


def check_model_is_used(model: str | None, *, cuts: bool, counts: bool) -> None:
    """Raises UsageError for a tokenizer that nothing asks for."""
    if model is not None and not (cuts or counts):
        raise UsageError(
            f"--model {model} is not used", "it cuts with --segment tokens:N or auto, and counts with --redact"
        )
