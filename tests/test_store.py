import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import orjson
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import rolling_trace, run_scripted, scripted_settings

from kvaudit import __version__
from kvaudit.errors import EngineError, RunError
from kvaudit.plan import make_plan
from kvaudit.schema import QUERIES, SCHEMA_VERSION, TABLES
from kvaudit.store import layout, manifest, new_manifest, open_folder, open_run, writing
from kvaudit.store.manifest import settings_digest

TRACE = rolling_trace(6, window=3, prelude=True)
ARMS = 2 + 2 * (3 + 2) + 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_scripted(tmp_path_factory.mktemp("runs") / "finished", TRACE, scripted_settings(capacity=90_000))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    return run_scripted(tmp_path_factory.mktemp("runs") / "untouched", TRACE)


@pytest.fixture
def run(tmp_path, untouched):
    shutil.copytree(untouched.path, tmp_path / "run")
    return open_run(tmp_path / "run")


def plan(trace=TRACE, settings=None, policies=("none", "token-topk")):
    return make_plan(len(trace.requests), "scripted", settings or scripted_settings(), policies, 3)


def opened(path, trace=TRACE, settings=None, **folder):
    return open_folder(path, new_manifest(trace, plan(trace, settings), 0.0), **folder)


def files(path):
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def finished_arms(path):
    return sum(arm.finished for arm in open_run(path).arms())


def part(run, table="observations", arm="none.reversed"):
    return layout.part_path(run.path, table, arm)


def rewrite(path, table=None, footer=None):
    """The same file with other rows, or with other facts in its footer."""
    before = pq.read_table(path)
    table = before if table is None else table
    pq.write_table(table.replace_schema_metadata({**before.schema.metadata, **(footer or {})}), path)


# What a run folder holds


def test_every_file_is_where_the_layout_says(finished):
    arms = [arm.arm_id for arm in finished.arms()]
    assert len(arms) == ARMS
    tables = ("observations", "selections", "provenance", "writes", "evictions")
    parts = {f"{table}/{arm}.parquet" for table in tables for arm in arms}
    assert files(finished.path) == {
        *parts,
        "manifest.json",
        "requests.parquet",
        "references.parquet",
        ".kvaudit.lock",
    }


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"comparisons", "summary"}))
def test_tables_have_their_schema_and_say_whose_they_are(finished, table):
    assert finished.table(table).schema.equals(TABLES[table])
    assert finished.table(table).num_rows > 0
    for path in [*finished.path.glob(f"{table}.parquet"), *finished.path.glob(f"{table}/*.parquet")]:
        footer = pq.read_metadata(path)
        assert footer.metadata[b"kvaudit.schema_version"] == str(SCHEMA_VERSION).encode()
        assert footer.metadata[b"kvaudit.trace_digest"] == TRACE.digest.encode()
        assert footer.metadata[b"kvaudit.settings_digest"] == finished.manifest["settings_digest"].encode()
        if footer.num_rows:
            assert footer.row_group(0).column(0).compression == "ZSTD"


def test_every_request_is_observed_once_in_every_arm(finished):
    rows = finished.table("observations").select(["arm_id", "request_id"]).to_pylist()
    assert len(rows) == len({tuple(row.values()) for row in rows}) == ARMS * len(TRACE.requests)


@pytest.mark.parametrize("table", ["requests", "references", "observations", "selections", "provenance", "writes"])
def test_tables_open_in_duckdb_pandas_and_polars(finished, table):
    single = finished.path / f"{table}.parquet"
    pattern = str(single if single.exists() else finished.path / table / "*.parquet")
    rows = finished.table(table).num_rows
    assert duckdb.sql(f"select count(*) from '{pattern}'").fetchall() == [(rows,)]
    assert duckdb.sql(f"select * from '{pattern}'").columns == TABLES[table].names
    polars = pl.read_parquet(pattern)
    assert (polars.height, polars.columns) == (rows, TABLES[table].names)
    frame = pd.read_parquet(single if single.exists() else finished.path / table)
    assert (len(frame), list(frame.columns)) == (rows, TABLES[table].names)


def test_the_manifest_is_enough_to_run_it_again(finished):
    held = finished.manifest
    assert (held["schema_version"], held["kvaudit_version"]) == (SCHEMA_VERSION, __version__)
    assert held["trace"] == {"digest": TRACE.digest, "source": TRACE.source, "requests": 6}
    assert held["settings"]["policies"] == ["none", "token-topk"]
    assert held["settings"]["switches"]["capacity_bytes"] == 90_000
    assert held["settings"]["max_noise"] == 0.0
    assert held["engine"]["model"] == "scripted"
    assert len(held["engine"]["tokenizer_digest"]) == 64
    assert {"numpy", "pyarrow"} <= set(held["libraries"])
    assert {"name", "platform", "python", "cpus"} <= set(held["host"])
    assert held["status"] == "finished"
    shuffle = next(arm for arm in held["arms"] if arm["order"] == "shuffle-1")
    assert shuffle["order_seed"] == plan().orders[2].seed


def test_the_manifest_says_where_policies_came_from_and_every_parameter(tmp_path):
    made = plan(policies=("none", "token-runs:m=8"))
    assert new_manifest(TRACE, made, 0.0)["policies"] == {
        "none": {"target": "kvaudit.policies.bounds:ReuseAll", "parameters": {}},
        "token-runs:m=8": {"target": "kvaudit.policies.controls:TokenRuns", "parameters": {"m": "8"}},
    }


def test_no_answer_depends_on_where_a_policys_file_lies():
    moved = replace(plan(), specs=tuple(replace(spec, target="elsewhere.py:Class") for spec in plan().specs))
    assert settings_digest(TRACE.digest, moved) == settings_digest(TRACE.digest, plan())


def test_a_folder_of_a_version_that_kept_no_origins_of_policies_is_read(run):
    held = orjson.loads((run.path / "manifest.json").read_bytes())
    del held["policies"]
    (run.path / "manifest.json").write_bytes(orjson.dumps(held))
    assert "policies" not in open_run(run.path).manifest
    with opened(run.path) as folder:
        assert len(folder.finished) == len(plan().arms)


def test_a_policy_with_parameters_has_files_that_are_found_again(tmp_path):
    run = run_scripted(tmp_path / "run", TRACE, policies=("token-runs:m=8",))
    assert (run.path / "observations/token-runs%3Am%3D8.reversed.parquet").is_file()
    assert set(run.table("observations")["policy"].to_pylist()) == {"full-prefill", "token-runs:m=8"}
    run_scripted(tmp_path / "run", TRACE, policies=("all",), force=True)
    assert not list((run.path / "observations").glob("token-runs*"))


def test_other_settings_and_other_traces_have_other_digests():
    digests = {
        settings_digest(TRACE.digest, plan()),
        settings_digest("other", plan()),
        settings_digest(TRACE.digest, plan(policies=("none",))),
        settings_digest(TRACE.digest, plan(policies=("none", "token-runs"))),
        settings_digest(TRACE.digest, plan(policies=("none", "token-runs:m=8"))),
        settings_digest(TRACE.digest, plan(settings=scripted_settings("position"))),
        settings_digest(TRACE.digest, plan(settings=scripted_settings(capacity=1))),
        settings_digest(
            TRACE.digest, replace(plan(), specs=tuple(replace(spec, source="edited") for spec in plan().specs))
        ),
    }
    assert len(digests) == 8


def test_an_arm_name_that_is_no_file_name_is_quoted(tmp_path):
    path = layout.part_path(tmp_path, "observations", "../../evil/policy.chronological")
    assert path.parent == tmp_path / "observations"


# Writing


def test_an_arm_streams_in_row_groups_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_ROW_GROUP_BYTES", 2_000)
    run = run_scripted(tmp_path / "run", rolling_trace(40))
    assert pq.read_metadata(part(run)).num_row_groups > 3
    assert pq.read_metadata(part(run)).num_rows == 40


def test_content_is_synced_before_a_file_takes_its_name_and_the_mark_comes_last(tmp_path, monkeypatch):
    events, rename = [], os.replace

    def replace(source, target):
        events.append(Path(target).relative_to(tmp_path).parts[0])
        rename(source, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("sync"))
    monkeypatch.setattr(os, "replace", replace)
    stamp = layout.Stamp("trace", "settings")
    with writing.PartFiles(tmp_path, "arm", stamp, {}):
        pass
    writing.write_bytes(tmp_path / "manifest.json", b"{}")
    files, folders = ["selections", "provenance", "writes", "evictions"], ["sync"] * 4
    assert events == [
        *["sync"] * 5,
        *files,
        *folders,
        "observations",
        "sync",
        "sync",
        "manifest.json",
        "sync",
    ]


class Stopped(BaseException):
    pass


class StopAfter:
    """Progress that ends a replay after some serves, wherever it is."""

    def __init__(self, serves):
        self.left = serves

    def begin(self, total, done):
        self.planned = (total, done)

    def arm(self, arm_id, number, arms):
        pass

    def served(self):
        self.left -= 1
        if self.left < 0:
            raise Stopped


@pytest.mark.parametrize("serves", [0, 5, 6, 11, 13, 40, ARMS * 6 - 1])
def test_a_replay_that_was_stopped_goes_on_and_ends_with_the_same_tables(tmp_path, run, serves):
    with pytest.raises(Stopped):
        run_scripted(tmp_path / "cut", TRACE, progress=StopAfter(serves))
    cut = open_run(tmp_path / "cut")
    assert cut.manifest["status"] == "unfinished"
    assert sum(arm.finished for arm in cut.arms()) == serves // 6
    assert cut.table("observations").num_rows == serves // 6 * 6
    assert not list(cut.path.rglob("*.tmp"))
    progress = StopAfter(ARMS * 6)
    again = run_scripted(tmp_path / "cut", TRACE, progress=progress)
    assert progress.planned == (ARMS * 6, serves // 6 * 6)
    assert progress.left == serves // 6 * 6
    for table in ("requests", "references", "observations", "selections", "provenance", "writes", "evictions"):
        assert again.table(table).equals(run.table(table))


@pytest.mark.parametrize("renames", range(6))
def test_an_arm_whose_renames_were_cut_off_is_not_finished(tmp_path, monkeypatch, run, renames):
    """Power is lost after some of an arm's files have their names."""
    real, arm = os.replace, "none.reversed"
    count = 0

    def replace(source, target):
        nonlocal count
        if arm in str(target):
            count += 1
            if count > renames:
                raise Stopped
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    if renames < 5:
        with pytest.raises(Stopped):
            run_scripted(tmp_path / "cut", TRACE)
    else:
        run_scripted(tmp_path / "cut", TRACE)
    finished = {arm.arm_id for arm in open_run(tmp_path / "cut").arms() if arm.finished}
    assert (arm in finished) == (renames == 5)
    monkeypatch.undo()
    again = run_scripted(tmp_path / "cut", TRACE)
    assert again.table("observations").equals(run.table("observations"))
    assert again.table("selections").equals(run.table("selections"))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_one_line_and_leaves_finished_arms(tmp_path, monkeypatch, call):
    real, count = getattr(os, call), 0

    def full(*arguments):
        nonlocal count
        count += 1
        if count > 30:
            raise OSError(errno.ENOSPC, "whatever")
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    monkeypatch.setattr(writing, "sync_folder", lambda folder: None)
    with pytest.raises(
        EngineError, match=r"^cannot write .*: No space left on device \(finished arms are kept"
    ) as caught:
        run_scripted(tmp_path / "run", TRACE)
    assert caught.value.exit_code == 3
    monkeypatch.undo()
    stopped = open_run(tmp_path / "run")
    assert 0 < sum(arm.finished for arm in stopped.arms()) < ARMS
    assert not list(stopped.path.rglob("*.tmp"))
    assert run_scripted(tmp_path / "run", TRACE).manifest["status"] == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_write_that_the_disk_refuses_names_the_file(tmp_path):
    stamp = layout.Stamp("trace", "settings")
    (tmp_path / "summary.parquet.tmp").symlink_to("/dev/full")
    with pytest.raises(EngineError, match=r"cannot write .*summary.parquet: No space left on device"):
        writing.write_table(tmp_path / "summary.parquet", "summary", stamp, [[{"metric": "fidelity"}] * 50_000])
    assert not files(tmp_path)


def test_a_text_is_whole_or_as_it_was(run, monkeypatch):
    with opened(run.path) as folder:
        folder.write_text(QUERIES, "select 'é'")

        def refused(source, target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "replace", refused)
        with pytest.raises(EngineError, match=r"cannot write .*queries.sql"):
            folder.write_text(QUERIES, "select")
    assert (run.path / QUERIES).read_bytes() == "select 'é'".encode()
    assert not list(run.path.rglob("*.tmp"))


# Claiming a folder


def test_nothing_is_left_of_a_replay_that_never_began(tmp_path):
    with opened(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with opened(tmp_path / "empty"):
        pass
    assert files(tmp_path / "empty") == set()


def test_the_same_settings_find_their_finished_arms(run):
    with opened(run.path) as folder:
        assert folder.finished == {arm.arm_id for arm in run.arms()}


def test_another_audit_in_the_folder_is_refused_and_left_as_it_is(run):
    before = files(run.path)
    with (
        pytest.raises(RunError, match=r"another audit, of rolling.jsonl \(changed: options\) .*--force to replace it"),
        opened(run.path, settings=scripted_settings("position")),
    ):
        pass
    assert files(run.path) == before
    assert open_run(run.path).table("observations").num_rows


def test_force_replaces_what_kvaudit_wrote_and_nothing_else(run):
    (run.path / "notes.md").write_text("mine")
    (run.path / "observations" / "notes.md").write_text("mine, too")
    forced = run_scripted(run.path, TRACE, scripted_settings("position"), policies=("all",), force=True)
    assert {"notes.md", "observations/notes.md"} < files(run.path)
    assert forced.manifest["settings"]["options"] == {"fault": "position"}
    assert not [name for name in files(run.path) if "token-topk" in name]


def test_force_removes_texts_of_the_audit_that_it_replaces(run):
    with opened(run.path) as folder:
        folder.write_text(QUERIES, "select 1")
    assert open_run(run.path).table("observations").num_rows
    (run.path / f"{QUERIES}.tmp").write_text("half")
    run_scripted(run.path, TRACE, force=True)
    assert not {QUERIES, f"{QUERIES}.tmp"} & files(run.path)


def test_a_text_alone_makes_no_audit(tmp_path):
    (tmp_path / QUERIES).write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no audit"), opened(tmp_path, force=True):
        pass
    assert files(tmp_path) == {QUERIES}


def test_force_keeps_the_old_audit_until_the_engine_is_there(run):
    before = files(run.path)
    with opened(run.path, settings=scripted_settings("position"), force=True):
        pass
    assert files(run.path) == before


@pytest.mark.parametrize("removed", [0, 1, 2, 7, 40, 61])
@pytest.mark.parametrize("settings", [None, scripted_settings("position")])
def test_a_force_that_was_killed_can_be_forced_again(run, monkeypatch, removed, settings):
    real, count = Path.unlink, 0

    def unlink(path, **options):
        nonlocal count
        count += path.suffix == ".parquet"
        if count > removed:
            raise Stopped
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(Stopped):
        run_scripted(run.path, TRACE, settings, force=True)
    monkeypatch.undo()
    for arm in open_run(run.path).arms():
        parts = [part(run, table, arm.arm_id).exists() for table in layout.ARM_TABLES]
        assert all(parts) or not arm.finished
    assert run_scripted(run.path, TRACE, settings, force=True).manifest["status"] == "finished"


def test_force_starts_the_same_audit_anew(run):
    with opened(run.path, force=True) as folder:
        assert folder.finished == frozenset()


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_audit_is_refused_even_with_force(tmp_path, force):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="is not empty and holds no audit"), opened(tmp_path, force=force):
        pass
    assert files(tmp_path) == {"thesis.tex"}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xfe"])
def test_a_manifest_that_is_not_kvaudits_is_never_replaced(tmp_path, content, force):
    (tmp_path / "manifest.json").write_bytes(content)
    with (
        pytest.raises(RunError, match=r"manifest.json is (damaged|not a manifest of kvaudit's)"),
        opened(tmp_path, force=force),
    ):
        pass
    assert (tmp_path / "manifest.json").read_bytes() == content


def test_a_file_is_no_run_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"), opened(tmp_path / "file"):
        pass


def test_two_replays_cannot_share_a_folder(tmp_path):
    with opened(tmp_path / "run"), pytest.raises(RunError, match="another replay is writing"), opened(tmp_path / "run"):
        pass
    with opened(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_replay_is_free(tmp_path):
    holder = (
        "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
        "print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / layout.LOCK
    with subprocess.Popen(
        [sys.executable, "-c", holder, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match="another replay is writing"), opened(tmp_path / "run"):
            pass
        process.kill()
    with opened(tmp_path / "run"):
        pass


@pytest.mark.parametrize("refused", ["mkdir", "open"])
def test_no_permission_is_one_line(tmp_path, monkeypatch, refused):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(*{"mkdir": (Path, "mkdir", refuse), "open": (os, "open", refuse)}[refused])
    with pytest.raises(RunError, match=r"cannot write to .*run: Permission denied"), opened(tmp_path / "run"):
        pass


def test_a_run_goes_on_only_with_the_engine_that_began_it(run):
    part(run).unlink()
    with opened(run.path) as folder:
        facts = run.manifest["engine"]
        with pytest.raises(RunError, match=r"begun with another engine: weights was None, is abc"):
            folder.begin({**facts, "weights": "abc"})
        folder.begin(facts)


def test_a_run_goes_on_only_on_the_processor_that_began_it(run, monkeypatch):
    """Another processor sums floats in another order: its answers would differ for no reason of the cache's."""
    assert run.manifest["engine"]["processor"] == manifest.processor_name() != ""
    part(run).unlink()
    monkeypatch.setattr(manifest, "processor_name", lambda: "Z80")
    with pytest.raises(RunError, match=r"begun with another engine: processor was .*, is Z80"):
        run_scripted(run.path, TRACE)


def test_a_processor_without_a_model_name_is_called_by_its_architecture(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda *arguments, **options: "processor : 0\nmodel name\t:\n")
    monkeypatch.setattr(manifest.platform, "processor", lambda: "")
    assert manifest.processor_name() == manifest.platform.machine()


# What is damaged, foreign or of another version


def test_a_damaged_part_is_an_error_to_readers_and_runs_anew_on_resume(run):
    whole = run.table("observations")
    content = part(run).read_bytes()
    part(run).write_bytes(content[: len(content) // 2])
    with pytest.raises(RunError, match=r"none.reversed.parquet is cut off or no Parquet file"):
        run.table("observations")
    assert run_scripted(run.path, TRACE).table("observations").equals(whole)


def test_another_runs_part_is_never_read(tmp_path, run):
    other = run_scripted(tmp_path / "other", TRACE, scripted_settings("position"))
    whole = run.table("observations")
    part(run).write_bytes(part(other).read_bytes())
    with pytest.raises(RunError, match="belongs to another run: its settings digest"):
        run.table("observations")
    assert run_scripted(run.path, TRACE).table("observations").equals(whole)


def test_a_part_with_too_few_rows_is_not_whole(run):
    rewrite(part(run), pq.read_table(part(run)).slice(1))
    with pytest.raises(RunError, match="has 5 rows for 6 requests"):
        run.arms()
    assert run_scripted(run.path, TRACE).table("observations").num_rows == ARMS * 6


def test_without_full_prefill_no_other_arm_counts(run):
    (run.path / "references.parquet").unlink()
    progress = StopAfter(6)
    with pytest.raises(Stopped):
        run_scripted(run.path, TRACE, progress=progress)
    assert progress.planned == (ARMS * 6, 0)
    assert [arm.arm_id for arm in open_run(run.path).arms() if arm.finished] == ["full-prefill.chronological"]


def test_temporary_files_of_a_killed_replay_are_removed(run):
    left = part(run).with_name(part(run).name + ".tmp")
    left.write_bytes(b"half")
    run_scripted(run.path, TRACE)
    assert not left.exists()


def test_an_interrupt_while_files_open_leaves_none(tmp_path, monkeypatch):
    real, opened_files = pq.ParquetWriter, 0

    def interrupted(*arguments, **options):
        nonlocal opened_files
        opened_files += 1
        if opened_files == 10:
            raise Stopped
        return real(*arguments, **options)

    monkeypatch.setattr(pq, "ParquetWriter", interrupted)
    with pytest.raises(Stopped):
        run_scripted(tmp_path / "run", TRACE)
    assert finished_arms(tmp_path / "run") == 1
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_finished_run_is_not_touched(run):
    before = {name: (run.path / name).stat().st_mtime_ns for name in files(run.path)}
    run_scripted(run.path, TRACE, open_engine=lambda settings: pytest.fail("opened"))
    del before[layout.LOCK]
    assert {name: (run.path / name).stat().st_mtime_ns for name in before} == before


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda path: path.unlink(), "requests.parquet is missing"),
        (lambda path: path.write_bytes(b""), "requests.parquet is empty"),
        (lambda path: path.write_bytes(b"PAR1 and no more"), "requests.parquet is cut off or no Parquet file"),
        (lambda path: pq.write_table(pa.table({"a": [1]}), path), "requests.parquet was not written by kvaudit"),
        (
            lambda path: rewrite(path, footer={b"kvaudit.schema_version": b"2"}),
            r"requests.parquet was written by a newer kvaudit \(schema 2, this one has schema 1\)",
        ),
        (
            lambda path: rewrite(path, footer={b"kvaudit.table": b"summary"}),
            "requests.parquet belongs to another run: its table is summary, not requests",
        ),
        (
            lambda path: rewrite(path, footer={b"kvaudit.trace_digest": b"0123"}),
            "requests.parquet belongs to another run: its trace digest is 0123",
        ),
        (
            lambda path: rewrite(path, pq.read_table(path).drop_columns(["ordinal"])),
            "requests.parquet has other columns than kvaudit writes: ordinal",
        ),
        (
            lambda path: rewrite(path, pq.read_table(path).append_column("mood", pa.array(["good"] * 6))),
            "requests.parquet has other columns than kvaudit writes: mood",
        ),
        (
            lambda path: rewrite(
                path,
                pq.read_table(path).cast(TABLES["requests"].set(1, pa.field("ordinal", pa.int32(), nullable=False))),
            ),
            "requests.parquet has other columns than kvaudit writes: ordinal",
        ),
    ],
)
def test_a_table_that_is_not_whole_and_its_own_is_named(run, break_it, message):
    break_it(run.path / "requests.parquet")
    with pytest.raises(RunError, match=message):
        run.table("requests")


def test_damage_inside_a_file_is_one_line(run):
    path = run.path / "requests.parquet"
    content = bytearray(path.read_bytes())
    content[8:200] = bytes(192)
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"requests.parquet is damaged"):
        run.table("requests")


def edited(run, **changes):
    path = run.path / "manifest.json"
    changed = {**orjson.loads(path.read_bytes()), **changes}
    path.write_bytes(orjson.dumps({key: value for key, value in changed.items() if value is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "png"}, "is not a manifest of kvaudit's"),
        ({"schema_version": 2}, "was written by a newer kvaudit"),
        ({"schema_version": 0}, "was written by an older kvaudit"),
        ({"schema_version": None}, "has no schema version that kvaudit knows"),
        ({"arms": ...}, "is damaged: it lacks arms"),
        ({"arms": [{"arm_id": "x"}]}, "was changed"),
        ({"arms": 7}, "was changed"),
        ({"trace": {}}, "was changed"),
    ],
)
def test_a_manifest_of_another_kind_or_version_is_refused(run, changes, message):
    edited(run, **changes)
    with pytest.raises(RunError, match=message):
        open_run(run.path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "there is no such folder"), ("empty", "it has no manifest.json"), ("file", "it is a file")],
)
def test_what_is_no_run_folder_is_refused(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=f"is no kvaudit run: {message}"):
        open_run(tmp_path / name)


# Reading


def test_provenance_of_some_requests_is_read_without_the_others(finished):
    arms = ["none.reversed", "token-topk.chronological"]
    whole = finished.table("provenance").to_pylist()
    wanted = [row for row in whole if row["arm_id"] in arms and row["request_id"] in ("r2", "r3")]
    found = finished.provenance(arms, ["r2", "r3"])
    assert found.schema.equals(TABLES["provenance"])
    assert sorted(map(str, found.to_pylist())) == sorted(map(str, wanted))
    assert finished.provenance(["no such arm"], ["r2"]).num_rows == 0


def test_a_folder_name_that_looks_like_a_partition_adds_no_column(tmp_path):
    run = run_scripted(tmp_path / "policy=none", TRACE)
    assert run.table("observations").schema.equals(TABLES["observations"])


def test_a_flipped_bit_in_a_page_is_damage_and_no_figure(run):
    """Each column chunk's pages carry checksums: no figure may come out of bytes that were not written."""
    path = part(run)
    column = pq.ParquetFile(path).metadata.row_group(0).column(TABLES["observations"].get_field_index("answer_text"))
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"none\.reversed\.parquet"):
        open_run(run.path).table("observations")


def test_a_trace_whose_file_name_is_not_utf8_has_a_manifest():
    made = new_manifest(replace(TRACE, source=os.fsdecode(b"b\xffd.jsonl")), plan(), 0.0)
    assert made["trace"]["source"] == "b\\xffd.jsonl"
    assert orjson.loads(orjson.dumps(made))["trace"] == made["trace"]


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made["arms"].pop(),
        lambda made: made["settings"].update(recompute_ratio=0.99),
        lambda made: made.update(settings=None),
        lambda made: made.update(arms=[]),
        lambda made: made["trace"].update(digest="other"),
        lambda made: made.update(trace=[]),
    ],
)
def test_a_manifest_that_was_edited_is_refused_by_reports_and_replays(run, change):
    edited = orjson.loads((run.path / "manifest.json").read_bytes())
    change(edited)
    (run.path / "manifest.json").write_bytes(orjson.dumps(edited))
    with pytest.raises(RunError, match="was changed"):
        open_run(run.path)
    with pytest.raises(RunError, match="was changed"):
        run_scripted(run.path, TRACE)
