"""Its place puts tests/ on the import path, so that test modules in folders find the shared builders here."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def do_not_wait_for_the_disk():
    """Runs are written by the hundred here, and none has to outlive a power cut."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda descriptor: None)
    yield
    patch.undo()
