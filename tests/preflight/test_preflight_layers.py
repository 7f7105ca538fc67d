"""What looks at a trace touches neither files nor models; only the page and the table know how results are shown."""

from __future__ import annotations

import pytest
from test_layers import INPUT_OUTPUT, MODULES, imports, ours

SHOWN = {"preflight.page", "preflight.table"}
BELOW = {"records", "errors", "prompts", "engines", "segmenting.grams", "segmenting.recurring"}
PURE = sorted(name for name in MODULES if name.startswith("preflight.") and name not in SHOWN)


def test_the_modules_were_found() -> None:
    assert {"preflight.prefix_caches", "preflight.reuse", "preflight.inspection"} <= set(PURE)


@pytest.mark.parametrize("module", PURE)
def test_looking_at_a_trace_is_pure(module: str) -> None:
    assert {name for name in ours(module) if not name.startswith("preflight")} <= BELOW
    assert not {target.partition(".")[0] for target in imports(module)} & {*INPUT_OUTPUT, "torch", "pyarrow", "rich"}
