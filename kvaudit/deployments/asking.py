"""Every request of a trace to two deployments, twice to each, in turns and one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvaudit.deployments.comparing import Compared, Told
from kvaudit.engines.server.sending import AttemptError
from kvaudit.engines.server.target import Target
from kvaudit.errors import EngineError
from kvaudit.records import Prompt, Sampling, Trace
from kvaudit.wordings import Wordings

PASSES = 2


def compared(
    trace: Trace, before: Target, after: Target, told: Callable[[], None] = lambda: None
) -> tuple[Compared, ...]:
    """Ask both everything, in the trace's order, one at a time and in turns; `told` is called after each answer.

    Raises EngineError where a deployment goes away, does not answer or is another one afterwards.
    """
    wordings = Wordings()
    answers: dict[int, list[list[Told]]] = {id(target): [] for target in (before, after)}
    for _ in range(PASSES):
        for target in (before, after):
            answers[id(target)].append(list(_one_pass(trace, wordings, target, told)))
    for target in (before, after):
        target.check_identity()
    return tuple(
        Compared(request.request_id, tuple(first), tuple(second))
        for request, first, second in zip(
            trace.requests,
            zip(*answers[id(before)], strict=True),
            zip(*answers[id(after)], strict=True),
            strict=True,
        )
    )


def _one_pass(trace: Trace, wordings: Wordings, target: Target, told: Callable[[], None]) -> Iterator[Told]:
    """Preludes are left out: they fill a cache, and no cache is looked at here."""
    for request in trace.requests:
        yield _answer(target, wordings.request(request), Sampling(request.max_tokens, request.stop))
        told()


def _answer(target: Target, prompt: Prompt, sampling: Sampling) -> Told:
    if prompt.wording is None:
        raise EngineError("a prompt came without its wording")
    try:
        answered = target.ask(prompt.wording, sampling)
    except EngineError as error:
        if isinstance(error.__cause__, AttemptError) and error.__cause__.kind == "refused":
            return Told("", error=error.message)
        raise
    return Told(answered.text, tuple(answered.reply.token_ids))
