"""Strategies look at texts and nothing else: no files, no models, and each family knows nothing of the others."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_layers import INPUT_OUTPUT, MODULES, imports, ours

from kvaudit.segmenting.strategies import KNOWN

INSIDE = sorted(name for name in MODULES if name.startswith("segmenting."))
FAMILIES = {f"segmenting.{known.target.partition(':')[0]}" for known in KNOWN}
BELOW = {"records", "errors", "traces.segments", "traces.templates"}


@pytest.mark.parametrize("module", INSIDE)
def test_segmenting_is_pure(module: str) -> None:
    assert {name for name in ours(module) if not name.startswith("segmenting")} <= BELOW
    assert not {target.partition(".")[0] for target in imports(module)} & {*INPUT_OUTPUT, "torch", "transformers"}


def test_families_do_not_know_each_other() -> None:
    assert set(INSIDE) >= FAMILIES
    for family in FAMILIES:
        assert not ours(family) & (FAMILIES - {family})


def test_the_table_is_read_without_anything_heavy() -> None:
    program = "import sys; import kvaudit.segmenting.strategies; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert not {"numpy", "regex", "orjson", "torch"} & set(out.split())
