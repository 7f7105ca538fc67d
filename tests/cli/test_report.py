import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from audit_runs import BuiltRun, arm_lines, clean, full_prefill, run
from fakes import rolling_trace
from typer.testing import CliRunner

from kvaudit.cli.report import report
from kvaudit.engines import EngineSettings
from kvaudit.errors import RunError, UsageError
from kvaudit.plan import make_plan
from kvaudit.store import new_manifest, open_folder

WORDS = "a b c d"
FULL_PREFILL = "full-prefill.chronological"

app = typer.Typer()
app.command()(report)


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def written(path: Path, built: BuiltRun) -> Path:
    """A run folder with the observations of a run in memory; its unfinished arms are left out.

    A rounding control that the run has not is finished with its order's own answers: rounding decides nothing.
    """
    requests = len(built.table("requests"))
    policies = [arm.policy for arm in built.planned if arm.policy != "full-prefill"]
    orders = len({arm.order for arm in built.planned})
    trace = rolling_trace(requests)
    plan = make_plan(requests, "embedded", EngineSettings(), policies, orders)
    rows = built.table("observations").to_pylist()
    finished = {arm.arm_id for arm in built.planned if arm.finished}
    with open_folder(path, new_manifest(trace, plan, 0.0)) as folder:
        folder.begin({"name": "embedded"})
        folder.write_table("requests", [built.table("requests").to_pylist()])
        for arm in plan.arms:
            measured = arm.arm_id.removesuffix(".rounding")
            if measured in finished:
                own = {"arm_id": arm.arm_id, "control": arm.control, "rounding_tokens": 0}
                with folder.arm(arm) as parts:
                    parts.add("observations", [row | own for row in rows if row["arm_id"] == measured])
    return path


def sensitive() -> BuiltRun:
    return run(
        full_prefill(WORDS) + arm_lines("token-topk", {"chronological": WORDS, "reversed": "w x y d"}, WORDS, WORDS)
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    return written(tmp_path / "run", sensitive())


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_report_is_printed_and_ends_in_the_verdict_s_exit_code(folder):
    found = invoke(folder)
    assert found.exit_code == 0
    assert found.stdout.startswith("Verdict: no gates")
    assert "token-topk: history-sensitive. 3 of 4 requests" in found.stdout
    assert "mask bottom-right" in found.stdout


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--max-variation", "0.2"], 1),
        (["--max-variation", "1"], 0),
        (["--max-variation", "0.8"], 4),
        (["--min-fidelity", "0.8"], 1),
        (["--min-fidelity", "0.8", "--exit-zero"], 0),
        (["--max-variation", "0.8", "--exit-zero"], 0),
        (["--max-variation", "0.2", "--policy", "token-topk"], 1),
    ],
)
def test_gates_decide_the_exit_code(folder, options, code):
    assert invoke(folder, *options).exit_code == code


def test_policy_limits_the_gates(tmp_path):
    lines = [arm_lines("none", {"chronological": WORDS, "reversed": WORDS}, WORDS, WORDS)]
    lines.append(arm_lines("token-topk", {"chronological": WORDS, "reversed": "x x x x"}, WORDS, WORDS))
    folder = written(tmp_path / "run", run(full_prefill(WORDS) + "\n".join(lines)))
    assert invoke(folder, "--max-variation", "0.7").exit_code == 1
    assert invoke(folder, "--max-variation", "0.7", "--policy", "none").exit_code == 0


def test_json_is_the_same_audit_as_data(folder):
    found = invoke(folder, "--format", "json", "--max-variation", "0.2")
    assert found.exit_code == 1
    audit = json.loads(found.stdout)
    assert audit["verdict"]["outcome"] == "fail"
    assert audit["findings"][0]["seen"] == "history-sensitive"


def error(*arguments):
    found = invoke(*arguments)
    assert found.stdout == ""
    return found.exception


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "nobody", "--max-variation", "0.5"],
        ["--policy", "token-topk"],
        ["--min-fidelity", "95"],
        ["--max-variation", "-0.1"],
        ["--max-variation", "nan"],
        ["--format", "pdf"],
    ],
)
def test_wrong_usage_is_refused(folder, options):
    found = error(folder, *options)
    assert isinstance(found, UsageError)
    assert found.exit_code == 2


def test_an_unfinished_run_is_inconclusive_as_far_as_it_goes(tmp_path):
    built = sensitive().unfinished("token-topk.chronological.reset", "token-topk.chronological.repeat")
    found = invoke(written(tmp_path / "run", built), "--max-variation", "0.2")
    assert found.exit_code == 4
    assert "2 of 6 arms are not finished" in " ".join(found.stdout.split())
    assert "reversed" in found.stdout


def test_a_run_without_a_finished_arm_is_inconclusive(tmp_path):
    built = sensitive().unfinished(*(arm.arm_id for arm in sensitive().arms()))
    assert invoke(written(tmp_path / "run", built)).exit_code == 4


# Bad runs: one line, exit code 2, never a pass


def part(folder: Path, arm_id: str = FULL_PREFILL) -> Path:
    return folder / "observations" / f"{arm_id}.parquet"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def newer(path: Path, version: object) -> None:
    manifest = orjson.loads(path.read_bytes())
    path.write_bytes(orjson.dumps(manifest | {"schema_version": version}))


def foreign_part(folder: Path) -> None:
    pq.write_table(pa.table({"city": ["Paris"]}), part(folder))


def rewritten(folder: Path, **changes) -> None:
    manifest = orjson.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest | changes))


def flipped_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)


BROKEN = {
    "gone": lambda folder: shutil.rmtree(folder),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("text")),
    "empty": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "cut manifest": lambda folder: cut(folder / "manifest.json"),
    "foreign manifest": lambda folder: (folder / "manifest.json").write_bytes(b'{"name": "x"}'),
    "manifest of a list": lambda folder: (folder / "manifest.json").write_bytes(b"[]"),
    "older schema": lambda folder: newer(folder / "manifest.json", 0),
    "newer schema": lambda folder: newer(folder / "manifest.json", 2),
    "no schema": lambda folder: newer(folder / "manifest.json", None),
    "no arms": lambda folder: rewritten(folder, arms=None),
    "arms of another kind": lambda folder: rewritten(folder, arms=[1]),
    "another trace": lambda folder: rewritten(folder, trace={"digest": "other", "source": "t", "requests": 4}),
    "noise limit of words": lambda folder: rewritten(folder, settings={"max_noise": "much"}),
    "cut part": lambda folder: cut(part(folder)),
    "empty part": lambda folder: part(folder).write_bytes(b""),
    "foreign part": foreign_part,
    "damaged part": lambda folder: flipped_bytes(part(folder)),
    "no requests": lambda folder: (folder / "requests.parquet").unlink(),
    "cut requests": lambda folder: cut(folder / "requests.parquet"),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("options", [[], ["--exit-zero", "--max-variation", "1"]], ids=["plain", "exit zero"])
def test_a_bad_run_is_an_error_and_never_a_pass(folder, damage, options):
    damage(folder)
    found = error(folder, *options)
    assert isinstance(found, RunError)
    assert found.exit_code == 2


def test_a_bad_run_is_one_line_for_the_user(folder):
    flipped_bytes(part(folder))
    found = subprocess.run([sys.executable, "-m", "kvaudit", "report", folder], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (2, "")
    assert [line.split(":")[1] for line in found.stderr.splitlines()] == [" error", " hint"]


def test_a_reader_that_leaves_early_is_no_traceback(folder):
    command = f"{sys.executable} -m kvaudit report {folder} -f json | head -c 100"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert len(found.stdout) == 100
    assert found.stderr == ""


def test_a_full_disk_behind_stdout_is_an_error(folder):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvaudit", "report", str(folder)]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert found.returncode not in (0, 1, 4)
    assert "No space left" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_damaged_provenance_is_named(folder):
    cut(folder / "provenance" / "token-topk.reversed.parquet")
    assert "provenance" in str(error(folder))


# Writing


def test_a_file_gets_the_report_and_stdout_the_verdict(folder, tmp_path):
    target = tmp_path / "audit.json"
    found = invoke(folder, "-f", "json", "-o", target, "--max-variation", "0.2")
    assert found.exit_code == 1
    assert [line.split(".")[0] for line in found.stdout.splitlines()] == [
        "token-topk: history-sensitive",
        "Verdict: fail (a gate is broken; exit code 1)",
    ]
    assert json.loads(target.read_bytes())["verdict"]["outcome"] == "fail"
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


def test_a_failed_write_is_an_error_and_leaves_the_old_file(folder, tmp_path, monkeypatch):
    target = tmp_path / "audit.txt"
    target.write_text("before")

    def full(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    found = error(folder, "-o", target)
    assert isinstance(found, RunError)
    assert "No space left" in str(found)
    assert target.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["audit.txt", "run"]


@pytest.mark.parametrize("target", ["missing/audit.txt", "held", "held/file/x"])
def test_a_place_that_cannot_be_written_is_an_error(folder, tmp_path, target):
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "file").write_text("mine")
    assert isinstance(error(folder, "-f", "json", "-o", tmp_path / target), RunError)


@pytest.mark.parametrize("target", ["manifest.json", "requests.parquet", "new"])
def test_a_report_is_not_written_into_its_own_run(folder, target):
    before = (folder / "manifest.json").read_bytes()
    assert isinstance(error(folder, "-f", "json", "-o", folder / target), UsageError)
    assert isinstance(error(folder, "-f", "parquet", "-o", folder / target), UsageError)
    assert (folder / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("table", ["selections", "provenance", "writes", "evictions"])
def test_damage_in_a_table_that_no_figure_needs_is_found_too(folder, table):
    damaged = folder / table / "token-topk.reversed.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert isinstance(error(folder, "--max-variation", "1"), RunError)
    damaged.unlink()
    assert isinstance(error(folder, "--max-variation", "1"), RunError)


def test_a_part_of_another_arm_is_found_by_its_rows(folder):
    parts = folder / "observations"
    shutil.copy(parts / "token-topk.chronological.parquet", parts / "token-topk.reversed.parquet")
    assert "another arm" in str(error(folder, "--max-variation", "1"))


def test_nothing_is_printed_when_a_file_cannot_be_written(folder, tmp_path):
    found = invoke(folder, "-f", "terminal", "-o", "-", "-f", "json", "-o", tmp_path / "missing" / "x.json")
    assert isinstance(found.exception, RunError)
    assert found.stdout == ""


def test_a_link_keeps_pointing_where_it_pointed(folder, tmp_path):
    (tmp_path / "real.txt").write_text("before")
    (tmp_path / "link.txt").symlink_to("real.txt")
    invoke(folder, "-o", tmp_path / "link.txt")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text().startswith("Verdict")


def test_a_device_is_written_to_and_not_replaced(folder):
    assert invoke(folder, "-o", "/dev/null").exit_code == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def program(folder: Path, *options: str) -> list[str]:
    code = "import sys; from kvaudit.cli.report import report; import typer; typer.run(report)"
    return [sys.executable, "-c", code, str(folder), *options]


def test_json_is_utf_8_even_where_stdout_is_ascii(tmp_path):
    built = run(
        full_prefill("t b") + arm_lines("token-topk", {"chronological": "t b", "reversed": "u b"}, "t b", "t b"),
        texts={"t": "é\u2028漢"},
    )
    folder = written(tmp_path / "run", built)
    plain = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    as_json = subprocess.run(
        program(folder, "-f", "json", "--exit-zero"), capture_output=True, env=plain, check=True
    ).stdout
    assert json.loads(as_json)["examples"][0]["reference"]["text"] == "é\u2028漢"
    for_people = subprocess.run(program(folder, "--exit-zero"), capture_output=True, env=plain, check=True).stdout
    assert rb"\xe9\u2028\u6f22" in for_people


def test_help_shows_examples_and_loads_nothing_heavy():
    assert "kvaudit report runs/prices -o audit.html -o audit.json" in invoke("--help").stdout
    code = "import sys, kvaudit.cli.report; print({'torch', 'pyarrow', 'scipy', 'numpy'} & set(sys.modules) or 'light')"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "light"


def test_a_clean_run_passes_its_gates(tmp_path):
    words = " ".join(f"w{index}" for index in range(60))
    folder = written(tmp_path / "run", run(clean("token-topk", words)))
    assert invoke(folder, "--min-fidelity", "0.9", "--max-variation", "0.1").exit_code == 0
