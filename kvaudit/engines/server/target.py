"""One server that is asked: how it is asked, what its answers are held to, what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from kvaudit.engines.server.asking import Manner
from kvaudit.engines.server.claims import Claims
from kvaudit.engines.server.counters import Counter
from kvaudit.engines.server.identity import Identity
from kvaudit.engines.server.retrying import Retries
from kvaudit.engines.server.sending import Connection, Reply
from kvaudit.proxy.answers import Choice
from kvaudit.records import Sampling, Wording


@dataclass(frozen=True, slots=True)
class Answered:
    """`cached`: prompt tokens that came from a cache, None where the server does not say."""

    reply: Reply
    choice: Choice
    attempts: int
    cached: int | None


@dataclass(slots=True)
class Target:
    connection: Connection
    manner: Manner
    retries: Retries
    claims: Claims
    counter: Counter
    identity: Identity

    def sent(self, path: str, body: bytes) -> tuple[Reply, int]:
        """The reply, and how many attempts it took. Raises EngineError where there is none."""

        def attempt() -> Reply:
            self.counter.watch.sending()
            return self.connection.ask(path, body)

        return self.retries.answered(attempt)

    def ask(self, wording: Wording, sampling: Sampling, salt: str | None = None) -> Answered:
        """Raises EngineError where there is no answer, the server is not what it was, or the arm is void."""
        path, body = self.manner.question(wording, sampling, salt)
        before = self.counter.watch.latest
        reply, attempts = self.sent(path, body)
        choice = self.claims.check(reply, sampling)
        return Answered(reply, choice, attempts, self.counter.cached(reply, before))
