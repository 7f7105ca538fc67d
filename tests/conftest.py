"""Its place puts tests/ on the import path, so that test modules in folders find the shared builders here."""

import os

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores: none takes two, and none spins
    os.environ |= {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}

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
