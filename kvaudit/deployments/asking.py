"""Every request of a trace to two deployments, twice to each and what changed again, in turns and one at a time.

Preludes are left out: they fill a cache, and no cache is looked at here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvaudit.deployments.comparing import Compared, Told
from kvaudit.engines.server.replies import AttemptError
from kvaudit.engines.server.target import Target
from kvaudit.errors import EngineError
from kvaudit.records import Prompt, Sampling, Trace
from kvaudit.wordings import Wordings

PASSES = 2


def compared(
    trace: Trace, before: Target, after: Target, told: Callable[[], None] = lambda: None
) -> tuple[Compared, ...]:
    """Ask both everything, in the trace's order, one at a time and in turns; `told` is called after each answer.

    What changed is then asked as often again: an answer that varies comes out alike twice at each of two deployments,
    and differs between them, one time in eight. Raises EngineError where a deployment goes away, does not answer or is
    another one afterwards.
    """
    wordings = Wordings()
    answers: list[tuple[list[Told], list[Told]]] = [([], []) for _ in trace.requests]

    def ask(places: Sequence[int], told: Callable[[], None]) -> None:
        for _ in range(PASSES):
            for side, target in enumerate((before, after)):
                for place in places:
                    request = trace.requests[place]
                    sampling = Sampling(request.max_tokens, request.stop)
                    answers[place][side].append(_answer(target, wordings.request(request), sampling))
                    told()

    def rows() -> Iterator[Compared]:
        for request, (first, second) in zip(trace.requests, answers, strict=True):
            yield Compared(request.request_id, tuple(first), tuple(second))

    ask(range(len(answers)), told)
    ask([place for place, row in enumerate(rows()) if row.became == "changed"], lambda: None)
    for target in (before, after):
        target.check_identity()
    return tuple(rows())


def _answer(target: Target, prompt: Prompt, sampling: Sampling) -> Told:
    if prompt.wording is None:
        raise EngineError("a prompt came without its wording")
    try:
        answered = target.ask(prompt.wording, sampling)
    except EngineError as error:
        if isinstance(error.__cause__, AttemptError) and error.__cause__.kind in ("refused", "broken"):
            return Told("", error=error.message)
        raise
    return Told(answered.text, tuple(answered.reply.token_ids))
