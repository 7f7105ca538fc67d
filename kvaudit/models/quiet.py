"""transformers and the libraries under it, without their progress bars, warnings and log lines on stderr."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from kvaudit.errors import EngineError, KvauditError


@contextmanager
def quietly(what: str) -> Iterator[None]:
    """Silence the loading of `what`; an error in it becomes one EngineError line that names `what`."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except KvauditError:
        raise
    except Exception as error:
        raise EngineError(
            f"{what} cannot be loaded: {first_line(error)}", "a file may be damaged or cut off"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def first_line(error: BaseException) -> str:
    """What an error of another library says, as one line."""
    return next(iter(str(error).strip().split("\n")), "") or type(error).__name__
