"""The contract of a policy, checked on synthetic requests: for `kvaudit policies check` and for a policy's own tests.

    assert [check for check in check_policy(MyPolicy) if not check.passed] == []

Requests go from small to large, so that the first that fails is a small one.
"""

from __future__ import annotations

import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import cast, get_args

import numpy as np

from kvaudit.errors import KvauditError
from kvaudit.policies import (
    BudgetContext,
    Need,
    Policy,
    Signals,
    Start,
    checked_budget,
    checked_schedule,
)
from kvaudit.policies.check_asking import (
    ContractError,
    Recording,
    arrays,
    kept_state,
    milliseconds,
    selected,
    shown,
)
from kvaudit.policies.check_cases import LONG, Case, extreme_cases, long_cases, random_cases, reusable
from kvaudit.policies.synthetic import make_prompt
from kvaudit.policies.tokens import TokenTopK

SECONDS = 60.0
"""How long one check may take, all its requests together."""
SLOW = 100.0
"""Above so many times token-topk's time (some milliseconds) a policy gets a warning. No more: it counts as TTFT."""

_RATIOS = (0.01, 0.05, 0.15, 0.5, 1.0)
_DEVIATIONS: frozenset[Need] = frozenset({"deviation", "key-deviation", "value-deviation"})


@dataclass(frozen=True, slots=True)
class Check:
    """`detail` says what was looked at or, where it failed, the smallest request that failed and what came back.

    `warning`: what a policy may do, and should not.
    """

    name: str
    passed: bool
    detail: str
    warning: str = ""


@dataclass
class _Subject:
    """The policy under test. `at` is the request that it is asked now; `warned` what its last check warns of; `file`
    where it is written, and `kept` what its class and module held, when it was first made."""

    maker: Callable[[], Policy]
    at: Case | None = None
    warned: str = ""
    file: str | None = None
    kept: dict[str, str] | None = None

    def make(self) -> Policy:
        policy = self.maker()
        if self.kept is None:
            self.kept = kept_state(type(policy))
            with suppress(TypeError, OSError):
                self.file = inspect.getsourcefile(type(policy))
        return policy

    def select(self, policy: Policy, case: Case) -> list[int]:
        self.at = case
        return selected(policy, case.context(policy))


def check_policy(make: Callable[[], Policy], seconds: float = SECONDS) -> list[Check]:
    """Every check on the policy that `make` makes: its class, where it needs no parameters.

    Where one takes longer than `seconds`, it fails, and those after it are left out.
    """
    return list(checks(make, seconds))


def checks(make: Callable[[], Policy], seconds: float = SECONDS) -> Iterator[Check]:
    """The same, one by one."""
    subject = _Subject(make)
    for name, check in _CHECKS.items():
        subject.at, subject.warned = None, ""
        done: list[Check] = []
        # A thread can be left behind, whatever it hangs in; it ends with the program.
        worker = Thread(target=lambda: done.append(_checked(name, check, subject)), daemon=True)  # noqa: B023
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            worker.start()
            worker.join(seconds)
        if not done:
            yield Check(name, False, f"{_at(subject)}still at it after {seconds:g} seconds{_place(worker, subject)}")
            return
        said = [f"{warning.category.__name__}: {warning.message}" for warning in warned]
        yield replace(done[0], warning="; ".join(dict.fromkeys([*said, done[0].warning] if done[0].warning else said)))


def _checked(name: str, check: Callable[[_Subject], str], subject: _Subject) -> Check:
    try:
        return Check(name, True, check(subject), subject.warned)
    except ContractError as error:
        return Check(name, False, f"{_at(subject)}{error}")
    except KvauditError as error:
        return Check(name, False, f"{_at(subject)}{error.message}")
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return Check(name, False, f"{_at(subject)}{said}{_line(frames, subject)}")


def _declares(subject: _Subject) -> str:
    policy = subject.make()
    if unknown := sorted(set(policy.needs) - set(get_args(Need))):
        raise ContractError(f"needs {unknown[0]!r}, which no engine has: {', '.join(get_args(Need))}")
    if policy.start not in get_args(Start):
        raise ContractError(f"starts at {policy.start!r}: {' or '.join(get_args(Start))}")
    if policy.start == "first-layer" and (unseen := sorted(_DEVIATIONS & policy.needs)):
        raise ContractError(f"starts at the first layer, where nothing is computed yet, and needs {unseen[0]}")
    if type(subject.make()) is not type(policy):
        raise ContractError("is another policy when it is made again")
    return f"{policy.name} needs {', '.join(sorted(policy.needs)) or 'nothing'} and starts at the {policy.start}"


def _budget(subject: _Subject) -> str:
    policy, fresh, count = subject.make(), subject.make(), 0
    for layout in ("d4-", *dict.fromkeys(case.layout for case in random_cases()), LONG):
        prompt = make_prompt(layout)
        for ratio in _RATIOS:
            request = BudgetContext(len(prompt.positions), ratio, prompt.segments, prompt.positions)
            given = [checked_budget(one, request) for one in (policy, policy, fresh)]
            if len(set(given)) > 1:
                raise ContractError(f'"{layout}", ratio {ratio}: {given[0]} tokens, and {max(given)} when asked again')
            count += 1
    return f"from 0 to N for {count} requests{'' if _has_own_budget(policy) else ', by the ratio'}"


def _schedule(subject: _Subject) -> str:
    policy, narrows, count = subject.make(), False, 0
    for tokens in (1, 2, 7, 100):
        for k in range(tokens + 1):
            for layers in (1, 2, 31):
                narrows |= checked_schedule(policy, k, tokens, layers) is not None
                count += 1
    return f"spends k tokens at each layer on average, {count} times" if narrows else "k tokens at each layer"


def _exactly_k(subject: _Subject) -> str:
    return _each(subject, random_cases())


def _extreme(subject: _Subject) -> str:
    return _each(subject, extreme_cases())


def _long(subject: _Subject) -> str:
    return f"{_each(subject, long_cases())} of {reusable(LONG):,} reusable tokens"


def _each(subject: _Subject, cases: tuple[Case, ...]) -> str:
    for case in cases:
        subject.select(subject.make(), case)
    return f"{len(cases)} requests"


def _deterministic(subject: _Subject) -> str:
    cases = random_cases()[::2]
    for case in cases:
        first, second = (subject.select(subject.make(), case) for _ in range(2))
        if first != second:
            raise ContractError(f"returned {shown(first)}, and {shown(second)} with the same seed")
    return f"{len(cases)} requests twice"


def _stateless(subject: _Subject) -> str:
    cases = [case for case in random_cases() if 0 < case.k < reusable(case.layout)][::4]
    alone = {case: subject.select(subject.make(), case) for case in cases}
    used = subject.make()
    for order in (cases, cases[::-1]):
        for served, case in enumerate(order):
            chosen = subject.select(used, case)
            if chosen != alone[case]:
                raise ContractError(
                    f"returned {shown(alone[case])} alone, and {shown(chosen)} after {served} other requests"
                )
    subject.at, before, after = None, subject.kept or {}, kept_state(type(used))
    if changed := [name for name in after if after[name] != before.get(name)]:
        raise ContractError(f"{' and '.join(changed)} changed while it was asked: an arm would see what another left")
    return f"{len(cases)} requests alone, in order and in reverse"


def _unchanged(subject: _Subject) -> str:
    cases = [case for case in (*random_cases()[::2], *extreme_cases()) if case.k]
    for case in cases:
        subject.at = case
        policy = subject.make()
        context, untouched = case.context(policy), arrays(case.context(policy))
        policy.select(context)
        for name, array in arrays(context).items():
            if not np.array_equal(array, untouched[name], equal_nan=True):
                raise ContractError(f"wrote into the {name} that it was given")
    return f"{len(cases)} requests"


def _needs(subject: _Subject) -> str:
    cases, asked, policy = random_cases()[::2], set[str](), subject.make()
    for case in cases:
        subject.at = case
        context = case.context(policy, frozenset(policy.needs))
        selected(policy, replace(context, signals=cast(Signals, Recording(context.signals, asked))))
        if undeclared := sorted((asked & set(get_args(Need))) - policy.needs):
            declared = ", ".join(sorted(policy.needs)) or "nothing"
            raise ContractError(f"asked `signals` for {', '.join(undeclared)}, and declares {declared}")
    subject.at = None
    if idle := sorted(set(policy.needs) - asked):
        subject.warned = f"declares {', '.join(idle)} and asked for none of it"
    return f"asked for {', '.join(sorted(asked & set(policy.needs))) or 'nothing'}"


def _speed(subject: _Subject) -> str:
    count = reusable(LONG)
    subject.at = long_cases()[0]
    own, plain = (milliseconds(policy, subject.at) for policy in (subject.make(), TokenTopK()))
    said = f"{own:,.{0 if own >= 10 else 2}f} ms for {count:,} reusable tokens, {own / plain:.1f} x token-topk's"
    if own / plain > SLOW:
        subject.warned = f"more than {SLOW:g} x token-topk's time, which counts as TTFT"
    return said


_CHECKS: Mapping[str, Callable[[_Subject], str]] = {
    "declaration": _declares,
    "budget": _budget,
    "schedule": _schedule,
    "exactly k distinct reusable positions": _exactly_k,
    "extreme shapes": _extreme,
    "long prompts": _long,
    "the same again under the same seed": _deterministic,
    "no state between requests": _stateless,
    "the context is left as it was": _unchanged,
    "asks only for what it declares": _needs,
    "speed": _speed,
}


def _has_own_budget(policy: Policy) -> bool:
    return type(policy).budget is not Policy.budget


def _at(subject: _Subject) -> str:
    return f"{subject.at}: " if subject.at is not None else ""


def _place(worker: Thread, subject: _Subject) -> str:
    frame = sys._current_frames().get(worker.ident or 0)
    return _line(traceback.extract_stack(frame), subject) if frame is not None else ""


def _line(frames: traceback.StackSummary, subject: _Subject) -> str:
    """The line of the policy's own file that is nearest to where it happened."""
    return next((f" (line {frame.lineno})" for frame in reversed(frames) if frame.filename == subject.file), "")
