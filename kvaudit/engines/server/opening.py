"""What holds for a whole run: how the server is asked, what it counts, where full prefill comes from."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator

from kvaudit.engines import EngineSettings
from kvaudit.engines.server.asking import OPTIONAL, Manner
from kvaudit.engines.server.claims import Claims
from kvaudit.engines.server.counters import Counter, way_of
from kvaudit.engines.server.engine import FullPrefill, ServerEngine
from kvaudit.engines.server.identity import check_model, read_identity, same_address
from kvaudit.engines.server.options import ServerOptions, key_in, read_options
from kvaudit.engines.server.probing import ASKED, LONG, SHORT, Lines, Probe, new_prompt
from kvaudit.engines.server.replies import AttemptError, Reply
from kvaudit.engines.server.resetting import Resetter
from kvaudit.engines.server.retrying import Retries
from kvaudit.engines.server.sending import Connection
from kvaudit.engines.server.target import Target
from kvaudit.engines.server.watching import Watch
from kvaudit.errors import EngineError, KvauditError, UsageError
from kvaudit.proxy.upstream import certificates
from kvaudit.records import Wording

_OTHER_FIELD = frozenset({400, 422})
"""Statuses of a request with a field that the server does not take."""
_OTHER_API = frozenset({404, 405, 501})


def opened(settings: EngineSettings) -> ServerEngine:
    """Raises UsageError for options that cannot be, EngineError for a server that cannot be audited."""
    options = read_options(settings.options)
    if options.reference_url is not None and same_address(options.base_url, options.reference_url):
        raise UsageError(
            "--reference-url is the server under audit",
            "give one with its cache off, or leave it out: a cache_salt or a reset then gives full prefill",
        )
    verify = certificates(insecure=False, authority=options.authority)
    connections: list[Connection] = []

    def connected(url: str, key_variable: str) -> Connection:
        connection = Connection(url, key_in(key_variable), verify, options.timeout)
        connections.append(connection)
        return connection

    try:
        target, probe = _target(connected(options.base_url, options.key_variable), settings, options)
        _check_concurrency(target, options)
        full_prefill = _full_prefill(settings, options, target, probe, connected)
    except BaseException:
        for connection in connections:
            connection.close()
        raise
    return ServerEngine(target, probe, Resetter(options, target.connection), full_prefill, options.concurrency)


def opened_plainly(settings: EngineSettings, options: ServerOptions, url: str, key_variable: str) -> Target:
    """A server whose answers alone count: neither its cache nor who else uses it matters. Raises as `opened`."""
    verify = certificates(insecure=False, authority=options.authority)
    connection = Connection(url, key_in(key_variable), verify, options.timeout)
    try:
        return _asked(connection, settings, options)[0]
    except BaseException:
        connection.close()
        raise


def _target(connection: Connection, settings: EngineSettings, options: ServerOptions) -> tuple[Target, Probe]:
    """A server whose cache matters, and what looks into that."""
    target, wording, cold = _asked(connection, settings, options, watched=True)
    probe = _probe(target, wording, cold, SHORT)
    if not probe.proven or probe.frame is None:
        wording = new_prompt(LONG, chat=probe.chat)
        cold, _ = target.sent(*target.manner.question(wording, ASKED))
        probe = _probe(target, wording, cold, LONG)
    if target.counter.way is None:
        probe.learn_times()
    return target, probe


def _probe(target: Target, wording: Wording, cold: Reply, lines: Lines) -> Probe:
    probe = Probe(target, bool(wording.messages), lines, _learn_counting(target, wording, cold))
    if probe.proven:
        probe.learn_frame()
    return probe


def _asked(
    connection: Connection, settings: EngineSettings, options: ServerOptions, *, watched: bool = False
) -> tuple[Target, Wording, Reply]:
    """How the server is asked, with the first prompt that it was asked and its answer.

    `watched`: restarts, and whom else it answers, matter from here on.
    """
    url = connection.base_url
    try:
        identity = read_identity(connection)
    except AttemptError as error:
        hint = "name its certificate with --ca" if "CERTIFICATE" in error.told else "is the server running at this URL?"
        raise EngineError(f"{url} cannot be asked: {error.told}", hint) from error
    check_model(identity, settings.model)
    counter, retries = Counter(Watch(connection)), Retries(options.retries)
    if watched:
        counter.watch.begin()
    return _first_answered(
        (chat, Target(connection, manner, retries, Claims(), counter, identity))
        for chat, manner in _manners(settings, options)
    )


def _first_answered(targets: Iterable[tuple[bool, Target]]) -> tuple[Target, Wording, Reply]:
    """The first way of asking that the server takes, the fullest comes first; each with whether it is asked by a chat.

    Where it takes none, raises EngineError with what the first API that it has says of the request without anything
    that may be left out. The other name of the limit counts where the server asked for it.
    """
    missing, refusals = list[EngineError](), list[tuple[bool, EngineError]]()
    for chat, target in targets:
        if missing and chat:
            continue
        wording = new_prompt(SHORT, chat=chat)
        try:
            reply, _ = target.sent(*target.manner.question(wording, ASKED))
        except EngineError as error:
            status = error.__cause__.status if isinstance(error.__cause__, AttemptError) else None
            if status not in _OTHER_FIELD | _OTHER_API:
                raise
            if status in _OTHER_API:
                missing.append(error)
            elif target.manner.limit == "max_tokens" or (refusals and target.manner.limit in str(refusals[-1][1])):
                refusals.append((chat, error))
            continue
        target.claims.check(reply, ASKED)
        return target, wording, reply
    told = [error for asked_by_chat, error in refusals if asked_by_chat == refusals[0][0]] or missing[:1]
    raise told[-1] if told else EngineError("the server takes no request")


def _manners(settings: EngineSettings, options: ServerOptions) -> Iterator[tuple[bool, Manner]]:
    """Whether the probe is a chat, and how to ask: everything first, then without what a server may refuse."""
    apis = {"auto": (True, False), "chat": (True,), "completions": (False,)}[options.api]
    plain = Manner(settings.model, options.api, settings.seed)
    for chat in apis:
        for count in range(len(OPTIONAL) + 1):
            yield chat, plain.without(*OPTIONAL[:count])
        yield chat, Manner(settings.model, options.api, settings.seed, OPTIONAL[:1], "max_completion_tokens")


def _learn_counting(target: Target, wording: Wording, cold: Reply) -> int:
    """From a prompt that was new (`cold`) and is now sent again; how much of that came from the cache."""
    counter = target.counter
    first = counter.all(cold, counter.watch.latest)
    counter.watch.check(counter.watch.settled())
    before = counter.watch.latest
    warm, _ = target.sent(*target.manner.question(wording, ASKED))
    target.claims.check(warm, ASKED)
    second = counter.all(warm, before)
    counter.way = way_of(first, second)
    counter.watch.check(counter.watch.settled())
    return 0 if counter.way is None else second.by(counter.way) or 0


def _full_prefill(
    settings: EngineSettings,
    options: ServerOptions,
    target: Target,
    probe: Probe,
    connected: Callable[[str, str], Connection],
) -> FullPrefill:
    """Where full prefill comes from: what the user says, else the most trusted way that works."""
    if options.reference_url is not None:
        other, looking = _target(connected(options.reference_url, options.other_key_variable), settings, options)
        differing = _differing(target, other)
        _check_reuses_nothing(other, looking)
        if looking.chat == probe.chat:
            _check_same_prompts(target, other, probe.new())
        return FullPrefill("url", other, differing)
    if options.reference in ("auto", "salt"):
        kept_apart = _salts_keep_apart(target, probe)
        if kept_apart:
            return FullPrefill("salt", target)
        if options.reference == "salt":
            raise EngineError(
                "the server does not keep requests of different cache_salt apart"
                if kept_apart is False
                else "whether the server keeps requests of different cache_salt apart cannot be seen",
                "take --reference-url or --reference reset",
            )
    return FullPrefill("reset", target)


def _differing(target: Target, other: Target) -> tuple[str, ...]:
    """What the reference says of itself, and the server under audit says otherwise.

    The same weights may lie elsewhere, and others under the same name: its answers show which.
    """
    ours, theirs = (
        {
            "version": asked.identity.version,
            "weights": asked.identity.weights(target.manner.model),
            "name in answers": asked.claims.model,
        }
        for asked in (target, other)
    )
    return tuple(
        f"its {name} {theirs[name]!r} and not {told!r}"
        for name, told in ours.items()
        if None not in (told, theirs[name]) and told != theirs[name]
    )


def _check_reuses_nothing(other: Target, looking: Probe) -> None:
    """Raises EngineError for a reference that was seen to serve a prompt from a cache."""
    url, off = other.connection.base_url, "turn its cache off: --no-enable-prefix-caching at vLLM, for instance"
    if looking.proven:
        raise EngineError(
            f"{url} was to give full prefill, and took {looking.kept} tokens of a known prompt from a cache", off
        )
    if other.counter.way is not None:
        looking.learn_times()
    if looking.cold_from is not None:
        raise EngineError(f"{url} answers a known prompt sooner than a new one: it has a cache", off)


def _check_same_prompts(target: Target, other: Target, wording: Wording) -> None:
    """Raises EngineError where the reference makes other tokens of a prompt."""
    asked = [one.ask(wording, ASKED).reply.answer for one in (target, other)]
    ours, theirs = (answer.counts()["prompt_tokens"] for answer in asked)
    if None not in (ours, theirs) and ours != theirs:
        raise EngineError(
            f"--reference-url {other.connection.base_url} makes {theirs} tokens of a prompt, and the server under "
            f"audit {ours}",
            "start it with the same model and the same chat template",
        )


def _check_concurrency(target: Target, options: ServerOptions) -> None:
    if options.concurrency > 1 and target.counter.way == "metrics":
        raise UsageError(
            "the server counts cached tokens in /metrics alone, where those of several requests are one number",
            "leave --concurrency out, or let the server count them in each answer's usage",
        )


def _salts_keep_apart(target: Target, probe: Probe) -> bool | None:
    """Whether a prompt that is in the cache is computed anew under a salt; None where nobody can tell."""
    try:
        probe.warm()
        if not probe.is_cached():
            return None
        salted = target.ask(probe.wording, ASKED, secrets.token_hex(16))
    except KvauditError as error:
        if isinstance(error.__cause__, AttemptError) and error.__cause__.status in _OTHER_FIELD:
            return False
        raise
    return None if salted.cached is None else salted.cached == 0
