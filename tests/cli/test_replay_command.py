import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from arm_progress import told_else, told_of_arms
from fakes import rolling_trace, write_trace

from kvaudit.schema.reference import queries
from kvaudit.store import open_run

REQUESTS = 6
ARMS = 2 + 2 * (3 + 2 + 2)
SCRIPTED = ("--engine", "scripted", "--orders", "3", "--recompute-ratio", "0.5")


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "rolling.jsonl", rolling_trace(REQUESTS, window=3))


def process(*arguments, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen([sys.executable, "-m", "kvaudit", *map(str, arguments)], **options)


def fault(name, *more):
    return [part for option in (f"fault={name}", *more) for part in ("--option", option)]


def tables(path):
    run = open_run(path)
    names = ("requests", "references", "observations", "selections", "provenance", "writes", "comparisons", "summary")
    return {name: run.table(name) for name in names}


def finished_arms(path):
    return len(list((path / "observations").glob("*.parquet")))


def wait_for_arms(path, count, running):
    deadline = time.monotonic() + 60
    while finished_arms(path) < count:
        assert running.poll() is None, running.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


# What a user sees


def test_a_replay_says_what_it_found_and_how_to_read_on(kvaudit, trace, tmp_path):
    code, out, err = kvaudit("replay", trace, *SCRIPTED, "-o", "my runs/first")
    *headline, command = out.splitlines()
    assert code == 0
    assert told_else(err) == ""
    assert headline[0].startswith("token-topk: none seen.")
    assert headline[1].startswith("document-aligned: none seen.")
    assert command == "Report: kvaudit report 'my runs/first'"
    assert set(tables(tmp_path / "my runs/first")) >= {"comparisons", "summary"}
    code, out, _ = kvaudit(*shlex.split(command.removeprefix("Report: kvaudit ")))
    assert code == 0
    assert "none seen" in out


def test_queries_stand_beside_the_tables_and_run_there(kvaudit, trace, tmp_path, monkeypatch):
    for more in ((), ("--seed", "1", "--force")):
        kvaudit("replay", trace, *SCRIPTED, *fault("position"), *more, "-o", "run")
        assert (tmp_path / "run" / "queries.sql").read_text() == queries()
    monkeypatch.chdir(tmp_path / "run")
    duckdb.sql(queries())


@pytest.mark.parametrize(
    ("planted", "code", "words"),
    [("position", 0, "history-sensitive"), ("no-reuse", 4, "Nothing was reused"), ("random", 4, "inconclusive")],
)
def test_the_exit_code_is_that_of_the_finding(kvaudit, trace, planted, code, words):
    left, out, _ = kvaudit("replay", trace, *SCRIPTED, *fault(planted), "-o", "run")
    assert left == code
    assert words in out


def test_the_same_command_finds_its_folder_and_computes_nothing_again(kvaudit, trace, tmp_path):
    first = kvaudit("replay", trace, *SCRIPTED)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("rolling-")
    assert f"kvaudit report runs/{folder.name}" in first[1]
    before = {file: file.stat().st_mtime_ns for file in folder.glob("observations/*")}
    code, out, err = kvaudit("replay", trace, *SCRIPTED)
    assert (code, out) == first[:2]
    finished = open_run(folder).manifest["finished"]
    assert err == f"nothing was replayed: all {ARMS} arms were finished on {finished}; --force replays them\n"
    assert {file: file.stat().st_mtime_ns for file in folder.glob("observations/*")} == before
    assert kvaudit("replay", trace, *SCRIPTED, "--force")[2].startswith("arm 1 of ")
    kvaudit("replay", trace, *SCRIPTED, "--seed", "1")
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_policy_that_was_edited_is_another_audit(kvaudit, trace, tmp_path, monkeypatch):
    kvaudit("replay", trace, *SCRIPTED)
    kvaudit("replay", trace, *SCRIPTED, "-o", "run")
    monkeypatch.setattr("kvaudit.policy_specs.source_digest", lambda policy: "edited")
    assert told_of_arms(kvaudit("replay", trace, *SCRIPTED)[2])
    assert len(list((tmp_path / "runs").iterdir())) == 2
    code, out, err = kvaudit("replay", trace, *SCRIPTED, "-o", "run")
    assert (code, out) == (2, "")
    assert f"run holds another audit, of {trace} (changed: policy sources)" in err


def test_requests_without_a_limit_are_told(kvaudit, tmp_path):
    lines = [f'{{"messages": [{{"role": "user", "content": "{number}"}}]}}' for number in range(3)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    err = kvaudit("replay", "chats.jsonl", *SCRIPTED)[2]
    assert told_else(err) == (
        "3 requests set no max_tokens: 16 are replayed (`kvaudit record import --max-tokens` sets another limit)\n"
    )


def test_options_reach_the_manifest(kvaudit, trace, tmp_path):
    options = ["--policy", "none", "--policy", "all", "--seed", "5", "--max-noise", "0.25", "--cache-capacity", "1MiB"]
    kvaudit("replay", trace, *SCRIPTED, "--like", "epic", "--gap", "store", *options, "-o", "run")
    settings = open_run(tmp_path / "run").manifest["settings"]
    assert settings["policies"] == ["none", "all"]
    assert (settings["seed"], settings["max_noise"], settings["recompute_ratio"]) == (5, 0.25, 0.5)
    assert settings["switches"] == {
        "mask": "exact",
        "gap": "store",
        "lookup": "any",
        "write_back": "isolated",
        "suffix": "with-rows",
        "deviation": "key",
        "keys": "moved",
        "check_layer": 1,
        "capacity_bytes": 2**20,
    }


def test_another_noise_limit_judges_the_same_answers_anew(kvaudit, trace, tmp_path):
    assert kvaudit("replay", trace, *SCRIPTED, "-o", "run")[0] == 0
    before = (tmp_path / "run/observations/token-topk.reversed.parquet").stat().st_mtime_ns
    assert kvaudit("replay", trace, *SCRIPTED, "-o", "run", "--max-noise", "0.5")[0] == 0
    assert (tmp_path / "run/observations/token-topk.reversed.parquet").stat().st_mtime_ns == before
    assert open_run(tmp_path / "run").manifest["settings"]["max_noise"] == 0.5


def test_another_audit_is_replaced_with_force_only(kvaudit, trace, tmp_path):
    kvaudit("replay", trace, *SCRIPTED, "-o", "run")
    code, out, err = kvaudit("replay", trace, *SCRIPTED, "--seed", "1", "-o", "run")
    assert (code, out) == (2, "")
    assert "run holds another audit" in err
    assert "--force" in err
    assert kvaudit("replay", trace, *SCRIPTED, "--seed", "1", "-o", "run", "--force")[0] == 0
    assert open_run(tmp_path / "run").manifest["settings"]["seed"] == 1


def test_an_audit_without_a_finished_arm_holds_no_folder(kvaudit, trace, tmp_path):
    kvaudit("replay", trace, *SCRIPTED, "-o", "run")
    for observations in (tmp_path / "run" / "observations").glob("*.parquet"):
        observations.unlink()
    assert kvaudit("replay", trace, *SCRIPTED, "--seed", "1", "-o", "run")[0] == 0
    assert open_run(tmp_path / "run").manifest["settings"]["seed"] == 1


def test_piped_progress_is_a_line_for_each_arm_that_runs(kvaudit, trace, tmp_path):
    err = kvaudit("replay", trace, *SCRIPTED, "-o", "run")[2]
    planned = [arm.arm_id for arm in open_run(tmp_path / "run").arms()]
    assert told_of_arms(err) == [(number, ARMS, arm) for number, arm in enumerate(planned, 1)]
    assert f": finished, {REQUESTS} requests in " in err
    (tmp_path / "run/observations" / f"{planned[5]}.parquet").unlink()
    assert told_of_arms(kvaudit("replay", trace, *SCRIPTED, "-o", "run")[2]) == [(6, ARMS, planned[5])]


@pytest.mark.slow
def test_progress_shows_at_a_terminal(trace, tmp_path):
    ours, theirs = pty.openpty()
    with process("replay", trace, *SCRIPTED, "-o", tmp_path / "run", stderr=theirs) as running:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:
                break
    os.close(ours)
    assert running.returncode == 0
    assert f"of {ARMS}".encode() in shown
    assert f"/{ARMS * REQUESTS}".encode() in shown
    assert b": finished" not in shown


# Bad input: one line, the right code, nothing written


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.jsonl", *SCRIPTED], 2, "missing.jsonl"),
        (["rolling.jsonl", "--engine", "vllm9"], 2, "unknown engine 'vllm9'"),
        (["rolling.jsonl", *SCRIPTED, "--policy", "luck"], 2, "unknown policy 'luck'"),
        (["rolling.jsonl", *SCRIPTED, "--recompute-ratio", "0"], 2, "the recompute ratio is 0.0"),
        (["rolling.jsonl", *SCRIPTED, "--recompute-ratio", "1.5"], 2, "the recompute ratio is 1.5"),
        (["rolling.jsonl", *SCRIPTED, "--recompute-ratio", "nan"], 2, "the recompute ratio is nan"),
        (["rolling.jsonl", *SCRIPTED, "--orders", "1"], 2, "1 order cannot show answer variation"),
        (["rolling.jsonl", *SCRIPTED, "--orders", "1000"], 2, "has 720 distinct orders, not 1000"),
        (["rolling.jsonl", *SCRIPTED, "--like", "magic"], 2, "unknown preset 'magic'"),
        (["rolling.jsonl", *SCRIPTED, "--max-noise", "2"], 2, "--max-noise is 2.0"),
        (["rolling.jsonl", *SCRIPTED, "--max-noise", "nan"], 2, "--max-noise is nan"),
        (["rolling.jsonl", *SCRIPTED, "--cache-capacity", "huge"], 2, "'huge' is not a size"),
        (["rolling.jsonl", *SCRIPTED, "--option", "x"], 2, "'x' is not an option"),
        (["rolling.jsonl", *SCRIPTED, "--option", "x=1"], 2, "no option 'x'"),
        (["rolling.jsonl", *SCRIPTED, "--seed", "-1"], 2, "the seed is -1"),
        (["rolling.jsonl", *SCRIPTED, "--format", "har9"], 2, "unknown trace format 'har9'"),
        (["rolling.jsonl", *SCRIPTED, "-o", "rolling.jsonl"], 2, "rolling.jsonl is a file"),
        (["rolling.jsonl", *SCRIPTED, "-o", "."], 2, "is not empty and holds no audit"),
        (["rolling.jsonl", *SCRIPTED, "-o", ".", "--force"], 2, "is not empty and holds no audit"),
        (["rolling.jsonl", *SCRIPTED, "-o", "/proc/none/run"], 2, "cannot write to /proc/none/run"),
        (
            ["rolling.jsonl", *SCRIPTED, "--option", "context=40"],
            2,
            "request 'r0' has a prompt of 133 tokens and asks for 8, more than the 40 that the model takes",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(kvaudit, trace, tmp_path, arguments, code, message):
    left, out, err = kvaudit("replay", *arguments)
    first, *hint = err.splitlines()
    assert (left, out) == (code, "")
    assert first.startswith("kvaudit: error: ")
    assert message in first
    assert len(hint) <= 1
    assert all(line.startswith("kvaudit: hint: ") for line in hint)
    assert {file.name for file in tmp_path.iterdir()} - {"runs"} == {"rolling.jsonl"}
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("arguments", "words", "help_of"),
    [
        (["replay"], "TRACE", "kvaudit replay"),
        (["replay", "a", "--orders", "many"], "--orders", "kvaudit replay"),
        (["replay", "a", "--recompute-ratio", "abc"], "--recompute-ratio", "kvaudit replay"),
        (["replay", "a", "--mask", "odd"], "exact", "kvaudit replay"),
        (["replay", "a", "--mood", "odd"], "--mood", "kvaudit replay"),
        (["record", "import", "a"], "--output", "kvaudit record import"),
        (["rewind"], "rewind", "kvaudit"),
        (["--x"], "--x", "kvaudit"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(kvaudit, arguments, words, help_of):
    code, out, err = kvaudit(*arguments)
    first, hint = err.splitlines()
    assert (code, out) == (2, "")
    assert first.startswith("kvaudit: error: ")
    assert words in first
    assert hint == f"kvaudit: hint: see {help_of} --help"


@pytest.mark.parametrize("arguments", [[], ["record"]])
def test_no_command_is_answered_with_help(kvaudit, arguments):
    code, out, err = kvaudit(*arguments)
    assert code == 2
    assert "Commands:" in out + err


@pytest.mark.parametrize("asked", [False, True])
def test_an_unexpected_error_is_no_failed_gate_and_its_traceback_is_there_for_the_asking(
    kvaudit, trace, monkeypatch, asked
):
    def broken(*arguments):
        raise ZeroDivisionError("in a\nplug-in")

    monkeypatch.setattr("kvaudit.traces.read_trace", broken)
    monkeypatch.setenv("KVAUDIT_TRACEBACK", "1" if asked else "")
    code, out, err = kvaudit("replay", trace, *SCRIPTED)
    *before, first, hint = err.splitlines()
    assert (code, out) == (3, "")
    assert first == "kvaudit: error: ZeroDivisionError: in a plug-in"
    assert hint.startswith("kvaudit: hint: this is a bug in kvaudit or in a plug-in; KVAUDIT_TRACEBACK=1")
    assert ("Traceback (most recent call last):" in before) == bool(before) == asked


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_line(kvaudit, trace, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    code, _, err = kvaudit("replay", trace, *SCRIPTED, "-o", tmp_path / "locked")
    assert code == 2
    assert "locked: Permission denied" in err


def test_an_engine_that_fails_names_arm_and_request_and_keeps_finished_arms(kvaudit, trace, tmp_path):
    code, out, err = kvaudit("replay", trace, *SCRIPTED, *fault("crash", "at=r4"), "-o", "run")
    assert (code, out) == (3, "")
    assert told_of_arms(err) == []
    assert err.splitlines()[0] == (
        "kvaudit: error: arm full-prefill.chronological, request 'r4': RuntimeError: the planted crash"
    )
    assert "Traceback" not in err
    assert finished_arms(tmp_path / "run") == 0
    assert not list(tmp_path.rglob("*.tmp"))


# Interruptions


@pytest.fixture
def slow(trace):
    return ["replay", trace, *SCRIPTED, *fault("position", "delay-ms=25"), "-o"]


@pytest.mark.slow
def test_a_killed_replay_goes_on_and_ends_with_the_same_tables(slow, tmp_path):
    with process(*slow, tmp_path / "run") as running:
        wait_for_arms(tmp_path / "run", 4, running)
        time.sleep(0.05)
        running.kill()
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "run/observations").glob("*.parquet")}
    assert 4 <= len(kept) < ARMS
    with process(*slow, tmp_path / "run") as again:
        assert again.wait() == 0, again.stderr.read()
    assert not list((tmp_path / "run").rglob("*.tmp"))
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    with process(*slow, tmp_path / "uninterrupted") as whole:
        assert whole.wait() == 0
    assert tables(tmp_path / "run") == tables(tmp_path / "uninterrupted")


@pytest.mark.slow
def test_ctrl_c_keeps_finished_arms_and_says_how_to_go_on(slow, tmp_path):
    with process(*slow, tmp_path / "run") as running:
        wait_for_arms(tmp_path / "run", 3, running)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate()
    finished = finished_arms(tmp_path / "run")
    assert (running.returncode, out) == (130, "")
    assert told_else(err).splitlines() == [
        f"kvaudit: error: interrupted: {finished} of {ARMS} arms are finished and kept in {tmp_path / 'run'}",
        "kvaudit: hint: the same command goes on from there",
    ]
    assert not list((tmp_path / "run").rglob("*.tmp"))
    with process(*slow, tmp_path / "run") as again:
        assert again.wait() == 0
    assert finished_arms(tmp_path / "run") == ARMS


@pytest.mark.slow
def test_a_second_replay_in_the_same_folder_is_refused(slow, tmp_path):
    with process(*slow, tmp_path / "run") as running:
        wait_for_arms(tmp_path / "run", 1, running)
        with process(*slow, tmp_path / "run") as second:
            out, err = second.communicate()
        assert running.poll() is None
        running.kill()
    assert (second.returncode, out) == (2, "")
    assert err.splitlines()[0] == f"kvaudit: error: another replay is writing to {tmp_path / 'run'}"


# Streams


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    read, write = os.pipe()
    os.close(read)
    with process("policies", stdout=write) as running:
        os.close(write)
        assert running.stderr.read() == ""
    assert running.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full, process("policies", stdout=full) as running:
        assert running.stderr.read() == "kvaudit: error: cannot write the output: No space left on device\n"
    assert running.returncode == 3
