"""`kvaudit replay --engine server`, as a user runs it."""

import subprocess
import sys
from contextlib import contextmanager

import faulty_server as faulty_server_module
import pytest
from arm_progress import told_else
from fakes import rolling_trace, write_trace
from faulty_server import KEY, faulty_server

from kvaudit import cli
from kvaudit.cli.servers import resets_note
from kvaudit.engines import EngineSettings
from kvaudit.engines.server import open_engine
from kvaudit.plan import make_plan
from kvaudit.store import open_run


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "rolling.jsonl", rolling_trace(4, window=3))


@pytest.fixture
def kvaudit(monkeypatch, capsys, tmp_path):
    """Run the command line here: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvaudit", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def audit(kvaudit, trace):
    def run(server, *more, reset=("--reset", "vllm")):
        address = ("--engine", "server", "--base-url", server.url)
        return kvaudit("replay", trace, *address, "--model", "m", "--orders", "3", "-o", "run", *reset, *more)

    return run


def test_the_verdict_says_what_it_rests_on(audit):
    with faulty_server("position") as server:
        code, out, err = audit(server)
    finding, rests_on, verdict, report = out.splitlines()
    told = "at least 24 (or 40, where full prefill comes from resets too)"
    asked = f"at the resets kvaudit asks short questions of its own, {told}\n"
    assert (code, told_else(err)) == (0, asked)
    assert finding.startswith("as-served: history-sensitive. 4 of 4 requests changed with the order")
    assert rests_on == (
        "Full prefill: a cache_salt of its own for each request; resets seen by usage; cached tokens from usage."
    )
    assert verdict.startswith("Verdict: no gates")
    assert report == "Report: kvaudit report run"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "24 (or 40, where full prefill comes from resets too)"),
        ({"reference": "salt"}, "24"),
        ({"reference": "auto", "reference-url": "http://h/v1"}, "24"),
        ({"reference": "reset"}, "40"),
    ],
)
def test_what_the_resets_ask_is_told_beforehand(options, told):
    arms = make_plan(4, "server", EngineSettings(), (), 3).arms
    server = {"base-url": "http://gpu/v1", "reset": "vllm"}
    note = resets_note(arms, 4, server | options)
    assert note == f"at the resets kvaudit asks short questions of its own, at least {told}"
    assert resets_note(arms[-1:], 4, server).endswith(" 2")


def test_nothing_is_told_of_resets_that_cannot_be(kvaudit, trace):
    address = ("--engine", "server", "--base-url", "http://127.0.0.1:9/v1", "--model", "m")
    code, _, err = kvaudit("replay", trace, *address, "--reset", "vllm", "--reset-method", "GET")
    assert code == 2
    assert "--reset-method says how" in err
    assert "at the resets" not in err


@pytest.mark.parametrize("reference", ["salt", "reset"])
def test_what_the_resets_ask_is_what_was_told(audit, reference):
    with faulty_server("none") as server:
        _, _, err = audit(server, "--reference", reference)
        ours = sum(" line 19 holds " in str(body) for body in server.bodies)
        engine = open_engine(
            EngineSettings(model="m", options={"base-url": server.url, "reset": "vllm", "reference": reference})
        )
        engine.close()
        to_open = sum(" line 19 holds " in str(body) for body in server.bodies) - ours
    assert f"at least {ours - 2 * to_open}\n" in err


def test_a_server_that_counts_nothing_is_inconclusive_and_the_flag_is_named(audit):
    with faulty_server("none", counters="nowhere") as server:
        code, out, _ = audit(server)
    assert code == 4
    assert "vLLM does with --enable-prompt-tokens-details and in /metrics, SGLang with --enable-cache-report" in out


def test_every_report_can_be_made_of_a_servers_audit(audit, kvaudit, tmp_path):
    with faulty_server("position") as server:
        audit(server)
    for name in ("terminal", "json", "markdown", "html", "junit", "csv", "parquet"):
        code, _, err = kvaudit("report", "run", "--format", name, "-o", f"report.{name}")
        assert (code, err) == (0, ""), name
    assert "as-served" in (tmp_path / "report.html").read_text()


def test_no_key_is_written_anywhere(audit, monkeypatch, tmp_path):
    monkeypatch.setenv("THEIR_KEY", KEY)
    with faulty_server("none", key=KEY) as server:
        code, out, err = audit(server, "--api-key-env", "THEIR_KEY")
    assert code == 0
    assert KEY not in out + err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.parametrize("how", ["command", "body", "query"])
def test_no_key_that_stands_in_a_reset_is_written_and_the_same_command_goes_on(audit, tmp_path, how):
    with faulty_server("none") as server:
        url = server.url.replace("/v1", "/reset_prefix_cache")
        post = f"import urllib.request as u; u.urlopen(u.Request('{url}', method='POST'))"
        reset = {
            "command": ("--reset-command", f'export KEY=hunter2; {sys.executable} -c "{post}"'),
            "body": ("--reset-url", url, "--reset-body", '{"password": "hunter2"}'),
            "query": ("--reset-url", f"{url}?pw=hunter2"),
        }[how]
        code, out, err = audit(server, reset=reset)
        assert code == 0
        assert "nothing was replayed" in audit(server, reset=reset)[2]
        changed = tuple(part.replace("hunter2", "hunter3") for part in reset)
        refused = audit(server, reset=changed)
    assert refused[0] != 0
    assert not [text for text in (out, err, *refused[1:]) if "hunter" in text]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    assert b"(sha256 " in (tmp_path / "run" / "manifest.json").read_bytes() or how == "body"


def test_a_wrong_key_is_one_line_and_a_hint(audit, monkeypatch, tmp_path):
    monkeypatch.setenv("KVAUDIT_API_KEY", "sk-wrong-0123456789")
    with faulty_server("none", key=KEY) as server:
        code, out, err = audit(server)
    assert (code, out) == (3, "")
    assert err.splitlines()[1] == (
        f"kvaudit: error: the server at {server.url} refused a request: status 401: wrong key: Bearer [secret removed]"
    )
    assert "--api-key-env" in err
    assert not (tmp_path / "run").exists()


def test_options_of_a_server_by_themselves_and_by_option_are_the_same_audit(audit, kvaudit, trace, tmp_path):
    with faulty_server("none") as server:
        audit(server, "--retries", "5", "--timeout", "60")
        given = ("base-url=" + server.url, "reset=vllm", "retries=5", "timeout=60.0")
        options = [part for option in given for part in ("--option", option)]
        again = kvaudit("replay", trace, "--engine", "server", "--model", "m", "--orders", "3", "-o", "run", *options)
    assert "nothing was replayed" in again[2]
    assert "at the resets" not in again[2]
    assert open_run(tmp_path / "run").manifest["settings"]["options"]["retries"] == "5"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "server"), "engine 'server' needs the name of a model"),
        (("--engine", "server", "--model", "m"), "needs the address of a server"),
        (("--engine", "server", "--model", "m", "--mask", "exact"), "--mask says how an engine computes"),
        (("--engine", "server", "--model", "m", "--study", "policies"), "--study compares policies"),
        (("--engine", "server", "--model", "m", "--like", "vllm"), "--like says how an engine computes"),
        (("--engine", "server", "--model", "m", "--policy", "none"), "takes no recomputation policy (none)"),
        (("--base-url", "http://gpu:8000/v1"), "--base-url is for a server, and the engine is 'embedded'"),
        (("--engine", "scripted", "--reset-command", "true"), "--reset-command is for a server"),
        (("--engine", "scripted", "--max-retried", "0.1"), "--max-retried is for a server"),
        (("--engine", "server", "--model", "m", "--max-retried", "2"), "--max-retried is 2.0"),
        (("--engine", "server", "--model", "m", "--compare-model", "n"), "--compare-model is the model's name at"),
        (("--engine", "server", "--model", "m", "--recompute-ratio", "0.1"), "--recompute-ratio says how an engine"),
        (("--engine", "scripted", "--policy", "as-served"), "'scripted' takes policies, and as-served is none"),
        (
            ("--engine", "server", "--model", "m", "--base-url", "http://h/v1"),
            "nothing says how this server's is emptied",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(kvaudit, trace, arguments, said):
    code, out, err = kvaudit("replay", trace, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_an_engine_that_takes_no_policies_heeds_what_it_says_it_does(kvaudit, trace):
    at_hand = ("--engine", "vllm", "--device", "cpu", "--dtype", "no-such-type")
    assert "--dtype says how" not in kvaudit("replay", trace, *at_hand)[2]
    assert "--dtype says how" in kvaudit("replay", trace, "--engine", "server", "--model", "m", "--dtype", "float32")[2]
    assert "--mask says how" in kvaudit("replay", trace, *at_hand, "--mask", "exact")[2]
    assert "--study compares policies" in kvaudit("replay", trace, *at_hand, "--study", "policies")[2]


def test_a_server_that_is_gone_leaves_finished_arms_and_the_same_command_goes_on(audit, tmp_path):
    with faulty_server("none") as server:
        server.behaviour.failures = dict.fromkeys(range(20, 24), crash)
        code, _, err = audit(server, "--retries", "0")
        assert code == 3
        assert "did not answer, 1 times" in err
        finished = len(list((tmp_path / "run" / "observations").glob("*.parquet")))
        assert finished
        server.behaviour.failures = {}
        code, out, _ = audit(server, "--retries", "0")
    assert code == 0
    assert "none seen" in out


@contextmanager
def process(port, dies_at):
    """The server as a process; its port."""
    command = [sys.executable, faulty_server_module.__file__, str(port), str(dies_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield int(server.stdout.readline().rpartition(":")[2])
        finally:
            server.kill()


def test_a_server_that_dies_in_mid_arm_voids_that_arm_alone(kvaudit, trace, tmp_path):
    def run(port):
        address = ("--engine", "server", "--base-url", f"http://127.0.0.1:{port}/v1", "--model", "m", "--reset", "vllm")
        return kvaudit("replay", trace, *address, "--orders", "3", "-o", "run")

    with process(0, dies_at=26) as port:
        code, _, err = run(port)
        assert code == 3
        assert "arm as-served.chronological" in err
        assert "went away in the middle of an arm" in err
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "observations").glob("*.parquet")}
    assert sorted(before) == ["full-prefill.chronological.parquet", "full-prefill.chronological.repeat.parquet"]
    with process(port, dies_at=-1):
        code, out, _ = run(port)
    assert (code, "none seen" in out) == (0, True)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run" / "observations").glob("*.parquet")}
    assert len(after) == 9
    assert before.items() <= after.items()


def crash():
    from starlette.responses import JSONResponse

    return JSONResponse({"error": "crashed"}, 500)
