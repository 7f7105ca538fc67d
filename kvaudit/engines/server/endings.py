"""Whether an answer is whole: by its finish reason, by its length, or because this server never gives a reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvaudit.errors import EngineError

if TYPE_CHECKING:
    from kvaudit.engines.server.sending import Reply

_AT_LIMIT = "length"


@dataclass(slots=True)
class Endings:
    """How one server ends its answers, as far as it was seen.

    `gives_reasons`: it gave one for an answer that ended by itself, so that an answer without one was cut.
    `ends_without`: an answer that ended by itself came without, and again when it was asked for again.
    """

    url: str
    gives_reasons: bool = False
    ends_without: bool = False
    _doubted: set[int] = field(default_factory=set)

    def doubt(self, reply: Reply, body: bytes, limit: int | None) -> str | None:
        """Why an answer to `body`, whose stream ended properly, may have been cut nevertheless; None where it is whole.

        Raises EngineError where answers that were taken as whole must be doubted now.
        """
        reasons = {choice.finish_reason for choice in reply.answer.choices.values()}
        if len(reply.answer.choices) != 1 or None not in reasons:
            self._doubted.discard(hash(body))
            self._learn(reasons - {None, _AT_LIMIT})
            return None
        if limit is not None and reply.tokens >= limit:
            return None
        if self.gives_reasons:
            return "the answer came without a finish reason, and earlier ones had one: it may have been cut"
        if self.ends_without or reply.is_counted or hash(body) in self._doubted:
            self.ends_without = True
            return None
        self._doubted.add(hash(body))
        return "the answer came without a finish reason and without a count of its tokens: it may have been cut"

    def _learn(self, reasons: set[str | None]) -> None:
        if not reasons:
            return
        self.gives_reasons = True
        if self.ends_without:
            self.ends_without = False
            raise EngineError(
                f"the server at {self.url} gives a finish reason to some answers and none to others, which may have "
                "been cut",
                "see the server's log, and replay into another folder",
            )
