"""Trace x arms -> observations: every arm from an empty cache, one request at a time (DESIGN 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

from kvaudit.engines import Capabilities, Engine, description, logs_in, unmet
from kvaudit.errors import EngineError, KvauditError, PolicyError, UsageError
from kvaudit.plan import Plan
from kvaudit.policies import Policy
from kvaudit.policies.rounding import Watched, is_watched, watched
from kvaudit.prompts import Prompts
from kvaudit.records import AS_SERVED, FULL_PREFILL, Arm, Reference, Request, Sampling, Trace
from kvaudit.rows import (
    Exchange,
    Row,
    eviction_rows,
    observation_row,
    provenance_rows,
    reference_row,
    request_row,
    selection_row,
    write_rows,
)
from kvaudit.store import RunFolder
from kvaudit.store.holding import differences
from kvaudit.store.layout import ENGINE_LOGS
from kvaudit.store.references import References
from kvaudit.store.writing import PartFiles
from kvaudit.wordings import Wordings

_REQUEST_ROWS_AT_ONCE = 256


class Progress(Protocol):
    """Told what a replay does. `begin` counts serves of requests, those of arms kept from before among `done`."""

    def begin(self, total: int, done: int) -> None: ...

    def arm(self, arm_id: str, number: int, arms: int) -> None: ...

    def served(self) -> None: ...


class Silent:
    def begin(self, total: int, done: int) -> None:
        pass

    def arm(self, arm_id: str, number: int, arms: int) -> None:
        pass

    def served(self) -> None:
        pass


def replay(
    trace: Trace, open_engine: Callable[[], Engine], plan: Plan, store: RunFolder, progress: Progress | None = None
) -> None:
    """Run every arm of the plan that the run folder does not hold yet.

    The second full prefill gets a newly opened engine, so that it shares nothing with the first. Raises EngineError,
    naming arm and request, when the engine fails; arms that were finished before stay.
    """
    progress = progress or Silent()
    arms = [(number, arm) for number, arm in enumerate(plan.arms, 1) if arm.arm_id not in store.finished]
    requests, planned = len(trace.requests), len(plan.arms)
    progress.begin(total=planned * requests, done=(planned - len(arms)) * requests)
    with logs_in(store.path / ENGINE_LOGS), ExitStack() as opened:
        replayer: _Replayer | None = None
        for number, arm in arms:
            if replayer is None:
                engine = _opened(open_engine, plan, opened)
                described = description(engine)
                replayer = _Replayer(trace, plan, store, progress, _prepared(trace, plan, store, engine))
            elif arm.policy == FULL_PREFILL and arm.control == "repeat":
                opened.close()
                del engine  # the next one must not stand in memory beside it
                engine = _opened(open_engine, plan, opened)
                _check_same(described, description(engine))
            progress.arm(arm.arm_id, number, planned)
            replayer.run(arm, engine)
    store.finish()


def _opened(open_engine: Callable[[], Engine], plan: Plan, stack: ExitStack) -> Engine:
    try:
        engine = open_engine()
    except KvauditError:
        raise
    except (Exception, SystemExit) as error:
        raise EngineError(f"engine {plan.engine!r} cannot be opened: {_said(error)}") from error
    stack.callback(engine.close)
    return engine


def _check_same(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse an engine that is another than it was when it was opened first."""
    changed = [f"{name} was {was}, is {became}" for name, was, became in differences(before, now)]
    if changed:
        told = ", ".join(changed)
        raise EngineError(f"the engine is not what it was when the replay began: {told}", "make it as it was")


def _prepared(trace: Trace, plan: Plan, store: RunFolder, engine: Engine) -> Prompts | Wordings:
    """Refuse what cannot work, then make the folder ready and write the trace's prompts into it."""
    if not engine.capabilities.policies and plan.policies != (AS_SERVED,):
        raise UsageError(
            f"engine {plan.engine!r} takes no recomputation policy ({', '.join(plan.policies)})",
            f"leave --policy out, or give {AS_SERVED}; `kvaudit engines` lists what each engine can do",
        )
    if engine.capabilities.policies and AS_SERVED in plan.policies:
        raise UsageError(
            f"engine {plan.engine!r} takes policies, and {AS_SERVED} is none",
            "give a policy: `kvaudit policies` lists them",
        )
    _check_policies(plan, engine)
    tokenizer = engine.tokenizer
    prompts = Wordings() if tokenizer is None else Prompts(tokenizer, engine.capabilities.vocabulary_size)
    prompts.check(trace, engine.capabilities)
    store.begin(description(engine))
    store.write_table("requests", _request_rows(trace, prompts))
    return prompts


def _check_policies(plan: Plan, engine: Engine) -> None:
    """Refuse a policy that needs what the engine cannot show it."""
    for spec in plan.specs:
        if lacking := unmet(spec.make(), engine.capabilities):
            raise UsageError(
                f"policy {spec.name!r} needs {lacking}, which engine {plan.engine!r} does not give",
                f"leave the policy out, or take another engine; {_given(engine.capabilities)}",
            )


def _given(capabilities: Capabilities) -> str:
    signals = capabilities.signals
    told = "any signal" if signals is None else ", ".join(sorted(signals)) or "no signal"
    return f"this one gives {told}" + (" at its check layer" if capabilities.selects_once else "")


def _request_rows(trace: Trace, prompts: Prompts | Wordings) -> Iterator[Sequence[Row]]:
    rows = (request_row(request, prompts.request(request)) for request in trace.requests)
    while batch := list(islice(rows, _REQUEST_ROWS_AT_ONCE)):
        yield batch


@dataclass
class _Replayer:
    trace: Trace
    plan: Plan
    store: RunFolder
    progress: Progress
    prompts: Prompts | Wordings

    @cached_property
    def references(self) -> References:
        return self.store.references()

    def run(self, arm: Arm, engine: Engine) -> None:
        policy = self._policy(arm)
        is_reference = policy is None and arm.control == "none"
        with self.store.arm(arm) as parts:
            for position, exchange in enumerate(self._exchanges(arm, engine, policy)):
                expected = None if is_reference else self.references.answer_ids(exchange.request_id)
                parts.add("observations", [observation_row(arm, self.plan.engine, position, exchange, expected)])
                _record_details(parts, arm, exchange)
                if is_reference:
                    answered = exchange.served.reference or Reference(exchange.served.answer_ids)
                    parts.add("references", [reference_row(exchange.request_id, answered)])
                self.progress.served()

    def _policy(self, arm: Arm) -> Policy | None:
        if arm.policy == FULL_PREFILL:
            return None
        policy = self.plan.spec(arm.policy).make()
        follow = arm.control == "rounding"
        return watched(policy, follow=follow) if is_watched(policy, follow=follow) else policy

    def _exchanges(self, arm: Arm, engine: Engine, policy: Policy | None) -> Iterator[Exchange]:
        """The arm's exchanges in its order. As many are under way as the engine takes: the oldest is waited for."""
        at_once = 1 if policy is None or arm.control == "reset" else engine.capabilities.concurrency
        if at_once == 1:
            for position, ordinal in enumerate(arm.order.permutation):
                yield self._exchange(arm, engine, ordinal, policy, is_first=position == 0)
            return
        first, *others = arm.order.permutation
        yield self._exchange(arm, engine, first, policy, is_first=True)
        under_way = deque[Future[Exchange]]()
        pool = ThreadPoolExecutor(at_once)
        try:
            for ordinal in others:
                under_way.append(pool.submit(self._exchange, arm, engine, ordinal, policy, is_first=False))
                if len(under_way) == at_once:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _exchange(self, arm: Arm, engine: Engine, ordinal: int, policy: Policy | None, *, is_first: bool) -> Exchange:
        """A prelude is only served where a cache can remember it: full prefill neither reads nor writes one."""
        request = self.trace.requests[ordinal]
        request_id = request.request_id
        is_reference = policy is None and arm.control == "none"
        reference = None if is_reference else self.references.reference(ordinal)
        with _naming(arm, request):
            state = engine.reset() if is_first or arm.control == "reset" else None
            decided_before = policy.decided if isinstance(policy, Watched) else 0
            prelude = () if policy is None else self.prompts.prelude(request)
            before = tuple(engine.serve(request_id, "prelude", prompt, Sampling(0), policy) for prompt in prelude)
            prompt, sampling = self.prompts.request(request), Sampling(request.max_tokens, request.stop)
            served = engine.serve(request_id, "request", prompt, sampling, policy, reference)
        return Exchange(
            request_id,
            before,
            served,
            cache_entries_before=None if state is None else state.entries,
            rounding_tokens=policy.decided - decided_before if isinstance(policy, Watched) else None,
        )


def _record_details(parts: PartFiles, arm: Arm, exchange: Exchange) -> None:
    if exchange.served.selection is not None:
        parts.add("selections", [selection_row(arm.arm_id, exchange.request_id, exchange.served.selection)])
    parts.add("provenance", provenance_rows(arm.arm_id, exchange))
    parts.add("writes", write_rows(arm.arm_id, exchange))
    parts.add("evictions", eviction_rows(arm.arm_id, exchange))


@contextmanager
def _naming(arm: Arm, request: Request) -> Iterator[None]:
    """Any failure becomes one that names arm and request and keeps what the engine said."""
    where = f"arm {arm.arm_id}, request {request.request_id!r}"
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.message}", error.hint) from error
    except KvauditError as error:
        raise EngineError(f"{where}: {error.message}", error.hint) from error
    except (Exception, SystemExit) as error:
        raise EngineError(
            f"{where}: {_said(error)}",
            "finished arms are kept, and the same command goes on from there; a changed policy is another audit",
        ) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
