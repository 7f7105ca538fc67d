import subprocess
import sys
from dataclasses import replace

import pytest
from audit_runs import BuiltRun, arm_lines, clean, full_prefill, run

from kvaudit.analysis.audit import analyse
from kvaudit.analysis.gates import Gates
from kvaudit.errors import RunError
from kvaudit.schema import TABLES


def test_an_audit_holds_every_stage_s_result():
    built = run(full_prefill("a b") + arm_lines("p", {"chronological": "a b", "reversed": "a x"}, "a b", "a b"))
    audit = analyse(built, Gates(min_fidelity=0.9))
    assert (audit.requests, len(audit.arms)) == (2, 6)
    assert [finding.seen for finding in audit.findings] == ["history-sensitive"]
    assert audit.verdict.outcome == "fail"
    assert len(audit.comparisons) == 2 * (4 + 1 + 1 + 1)
    assert audit.comparisons.schema == TABLES["comparisons"]
    assert len(audit.summary) == len(audit.figures)
    assert [example.request_id for example in audit.examples] == ["r1"]


@pytest.mark.parametrize("limit", [-1, 2, "much", True, [0]])
@pytest.mark.parametrize("name", ["max_noise", "max_retried"])
def test_a_limit_that_is_none_is_refused(name, limit):
    with pytest.raises(RunError, match=name):
        analyse(run(clean(), settings={name: limit}))


@pytest.mark.parametrize("manifest", [{}, {"settings": None}, {"settings": [1]}, {"settings": {"seed": "x"}}])
def test_a_manifest_that_says_little_is_enough(manifest):
    assert analyse(replace(run(clean()), manifest=manifest)).findings[0].seen == "none-seen"


def test_an_unfinished_run_is_told_as_far_as_it_goes():
    built: BuiltRun = run(
        clean("p")
        + "\n"
        + arm_lines("q", dict.fromkeys(("chronological", "reversed"), "a b c d"), "a b c d", "a b c d")
    )
    audit = analyse(built.unfinished("q.reversed", "q.chronological.reset", "q.chronological.repeat"))
    assert [finding.seen for finding in audit.findings] == ["none-seen", "inconclusive"]
    assert (audit.verdict.outcome, audit.verdict.exit_code) == ("inconclusive", 4)


def test_the_pure_middle_imports_neither_torch_nor_statistics_before_it_needs_them():
    heavy = "{'torch', 'scipy', 'statsmodels', 'rich', 'typer'}"
    program = f"import sys, kvaudit.analysis.audit; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
