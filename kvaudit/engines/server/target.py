"""One server that is asked: how it is asked, what its answers are held to, what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvaudit.engines.server.asking import Manner
from kvaudit.engines.server.claims import Claims, answer_text
from kvaudit.engines.server.counters import Counter
from kvaudit.engines.server.identity import Identity, read_identity
from kvaudit.engines.server.replies import AttemptError, Reply
from kvaudit.engines.server.retrying import Retries
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import EngineError
from kvaudit.proxy.answers import Choice
from kvaudit.records import Sampling, Wording

_PAUSE = 0.5


@dataclass(frozen=True, slots=True)
class Answered:
    """`text`: all that was said, without the key. `cached`: prompt tokens that came from a cache, None where the server
    does not say.
    """

    reply: Reply
    choice: Choice
    text: str
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

    def facts(self) -> Mapping[str, object]:
        """What stays as long as the deployment does."""
        return self.identity.facts(self.manner.model)

    def check_identity(self) -> None:
        """Raises EngineError where another model or version is behind the URL than at the opening.

        What the server does not say now it is asked again: it may be busy.
        """
        for _ in range(self.retries.limit + 1):
            now = self._facts_now()
            if now == self.facts() or None not in now.values():
                break
            self.retries.pause(_PAUSE)
        if now != self.facts() and None in now.values():
            raise EngineError(
                f"{self.connection.base_url} does not say any more which deployment it is: it was "
                f"{_told(self.facts())}, it is {_told(now)}",
                "see the server's log, and whether its key is still good; the same command starts the arm anew",
            )
        if now != self.facts():
            raise EngineError(
                f"the deployment at {self.connection.base_url} was changed: it was {_told(self.facts())}, "
                f"it is {_told(now)}",
                "an audit is of one deployment: replay into another folder",
            )

    def _facts_now(self) -> Mapping[str, object]:
        try:
            return read_identity(self.connection).facts(self.manner.model)
        except AttemptError as error:
            raise EngineError(f"{self.connection.base_url} cannot be asked any more: {error.told}") from error

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
        text = self.connection.without_key(answer_text(choice))
        return Answered(reply, choice, text, attempts, self.counter.cached(reply, before))


def _told(facts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
