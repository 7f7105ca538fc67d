"""Its place puts tests/ on the import path, so that test modules in folders find the shared builders here."""

import os

import pytest
from hypothesis import settings

# New examples belong on a developer's machine: in continuous integration the same commit gets the same answer.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True, scope="session")
def do_not_wait_for_the_disk():
    """Runs are written by the hundred here, and none has to outlive a power cut."""
    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", lambda descriptor: None)
    yield
    patch.undo()
