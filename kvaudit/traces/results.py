"""What a file of a batch's results says of requests that another file holds."""

from __future__ import annotations

from collections.abc import Mapping

from kvaudit.errors import TraceError

FORMAT = "openai-batch"


class ResultsOnlyError(TraceError):
    """A file with the results of a batch and no requests. `failures` says why requests failed, by their ids."""

    def __init__(self, name: str, failures: Mapping[str, str]) -> None:
        super().__init__(
            f"{name} holds the results of a batch, and no prompts",
            "import it with its input: kvaudit record import INPUT RESULTS -o TRACE",
        )
        self.failures = failures
