"""The same request again until it is answered, within a limit: each time that it is sent is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvaudit.engines.server.replies import AttemptError, Failing, Reply
from kvaudit.errors import EngineError

_AGAIN: frozenset[Failing] = frozenset({"lost", "slow", "busy", "broken"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Retries:
    """`limit`: how often a request is sent again. `pause` waits that many seconds."""

    limit: int
    pause: Callable[[float], None] = time.sleep

    def answered(self, attempt: Callable[[], Reply]) -> tuple[Reply, int]:
        """The reply, and how many attempts it took. Raises EngineError for what no further attempt mends."""
        number = 1
        while True:
            try:
                return attempt(), number
            except AttemptError as error:
                server = f"the server at {error.url}" if error.url else "the server"
                if error.kind == "gone":
                    raise EngineError(
                        f"{server} went away in the middle of an arm ({error.told}): the arm is void",
                        "start the server again; the same command starts the arm anew",
                    ) from error
                if error.kind not in _AGAIN:
                    raise EngineError(f"{server} refused a request: {error.told}", _hint(error)) from error
                if number > self.limit:
                    raise EngineError(
                        f"{server} did not answer, {number} times in a row; the last time: {error.told}",
                        "see the server's log; --retries and --timeout set the limits",
                    ) from error
                self.pause(_wait(error, number))
                number += 1


def _wait(error: AttemptError, number: int) -> float:
    asked = error.wait if error.wait is not None else _FIRST_PAUSE * 2 ** (number - 1)
    return float(min(asked, _LONGEST_PAUSE))


def _hint(error: AttemptError) -> str | None:
    if error.status in (401, 403):
        return (
            "put the server's key into the environment variable that --api-key-env names (KVAUDIT_API_KEY), that of "
            "another server into the one that --other-key-env names (KVAUDIT_OTHER_API_KEY)"
        )
    if error.status is not None and 300 <= error.status < 400:
        return "give the address that answers by itself, and the key that it asks for"
    if error.status in (404, 405):
        return (
            "look whether --base-url ends where the server's /chat/completions begins, most often in /v1; a server "
            "that offers chats alone takes a trace's texts with --api chat"
        )
    return None
