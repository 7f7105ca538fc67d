"""No process of vLLM's outlives the kvaudit that started it: a killed parent cannot end its children."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from threading import Thread


def end_with_parent() -> None:
    """In a process that multiprocessing started: end when its parent does. Elsewhere nothing."""
    parent = parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, name="kvaudit-end-with-parent", daemon=True).start()
