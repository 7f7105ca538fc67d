"""The one base error: a message, a hint on what to do, and the exit code it ends in."""

from __future__ import annotations


class KvauditError(Exception):
    """An error that is shown to the user as one line, without a traceback.

    `message` says what is wrong and where, `hint` what to do about it.
    """

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(KvauditError):
    """Wrong options, unknown names, impossible settings."""


class TraceError(KvauditError):
    """A trace or an event table that cannot be read."""


class RunError(KvauditError):
    """A run folder that cannot be read, resumed or replaced."""


class PluginError(KvauditError):
    """A policy, engine, trace format or report that cannot be loaded."""


class PolicyError(KvauditError):
    """A policy broke its contract; the message names it."""

    exit_code = 3


class EngineError(KvauditError):
    """The engine, or the replay around it, failed."""

    exit_code = 3
