import json
import subprocess
import sys

import pytest
from faulty_server import faulty_server

from kvaudit import cli, plugins
from kvaudit.cli import doctor
from kvaudit.doctor.checks import Finding
from kvaudit.doctor.trying import Setting, Trial
from kvaudit.engines.vllm.versions import SUPPORTED


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvaudit", "doctor", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def tried(monkeypatch):
    def put(trial):
        monkeypatch.setattr("kvaudit.doctor.trying.try_engine", lambda name, settings, progress: trial)

    return put


def test_it_says_what_is_known_and_whether_each_engine_works(run):
    code, out, err = run()
    assert code == 0
    assert err == ""
    for row in SUPPORTED:
        assert str(row) in out
    for name in plugins.available("engines"):
        assert f"\n  {name} " in out


def test_a_command_to_install_is_one_line_that_can_be_copied(run, monkeypatch):
    from kvaudit.doctor import readiness
    from kvaudit.engines.vllm.versions import Installed, install_command

    monkeypatch.setattr(readiness, "installed", Installed)
    device = readiness.likely_device(Installed(), bool(readiness.this_machine().gpus))
    lines = [line.strip() for line in run()[1].splitlines()]
    assert install_command("lmcache", Installed(), device) in lines
    assert install_command("vllm", Installed(), device) in lines


def test_a_variable_that_is_set_to_nothing_is_not_called_unset(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    shown = {line.split()[0]: line for line in run()[1].partition("Environment")[2].splitlines() if line.strip()}
    assert shown["CUDA_VISIBLE_DEVICES"].endswith("set, and empty")
    assert shown["GOMP_SPINCOUNT"].endswith("not set")


def test_as_data_it_has_a_version_and_stable_keys(run):
    code, out, _ = run("-f", "json")
    data = json.loads(out)
    assert code == data["exit_code"] == 0
    assert data["doctor_version"] == doctor.DOCTOR_VERSION
    assert data["trial"] is None
    assert set(data) == {"doctor_version", "exit_code", "survey", "trial"}
    assert {"machine", "packages", "supported", "variables", "engines"} <= set(data["survey"])


@pytest.mark.parametrize("arguments", [(), ("-f", "json")])
def test_it_answers_without_torch(arguments):
    program = (
        "import sys\nfrom kvaudit.cli import app\n"
        f"app({['doctor', *arguments]!r}, standalone_mode=False)\nprint(*sys.modules, file=sys.stderr)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stderr
    assert not {"torch", "vllm", "lmcache"} & {name.partition(".")[0] for name in loaded.split()}


@pytest.mark.parametrize(
    ("arguments", "told"), [(("-f", "yaml"), "unknown format 'yaml'"), (("--engine", "vlm"), "unknown engine 'vlm'")]
)
def test_wrong_usage(run, arguments, told):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert told in err


@pytest.mark.parametrize(
    ("finding", "code", "told"),
    [
        (Finding("gap", "seen", "separators are zero", "--gap zero", {"size of keys": 0.0}), 0, "(--gap zero)"),
        (Finding("gap", "inconclusive", reason="nothing was reused"), 4, "inconclusive: nothing was reused"),
        (Finding("gap", "failed", reason="it died"), 3, "failed: it died"),
    ],
)
def test_what_a_check_saw_is_told_and_decides_the_exit_code(run, tried, finding, code, told):
    tried(Trial("lmcache", "a model", findings=(finding,)))
    left, out, _ = run("--engine", "lmcache")
    assert left == code
    assert told in out.partition("Engine lmcache, model a model")[2]
    left, out, _ = run("--engine", "lmcache", "-f", "json")
    data = json.loads(out)
    assert left == data["exit_code"] == code
    assert data["trial"]["findings"][0]["outcome"] == finding.outcome


def test_settings_and_errors_are_told_with_what_to_do(run, tried):
    setting = Setting("cuda-graphs", "a captured graph runs without the calls", "leave it out", spoils=True)
    tried(Trial("lmcache", "a model", (setting,), (), "cuda-graphs: it spoils", "leave it out", 2))
    code, out, _ = run("--engine", "lmcache")
    assert code == 2
    assert "spoils an audit: a captured graph runs without the calls" in out
    assert "FAILED" in out
    assert "leave it out" in out


def test_a_server_is_given_by_options(run):
    with faulty_server() as server:
        address = ("--option", f"base-url={server.url}", "--option", "reset=vllm")
        code, out, _ = run("--engine", "server", "--model", "m", *address)
    assert code == 0, out
    assert "after a reset answers the same" in " ".join(out.split())


def test_a_server_without_an_address_is_told_how_doctor_takes_it(run):
    code, out, _ = run("--engine", "server", "--model", "m")
    assert code == 2
    assert "--option base-url=http://HOST:PORT/v1" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--engine", "server"), "needs the name of a model"),
        (("--engine", "server", "--model", "m", "--like", "epic"), "--like says how an engine computes"),
        (("--engine", "vllm", "--like", "epic"), "--like says how an engine computes"),
    ],
)
def test_options_that_a_server_has_no_use_for(run, arguments, told):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert told in err


def test_a_model_that_cannot_be_had_is_no_traceback(run):
    code, out, err = run("--engine", "embedded", "--model", "./no-such-folder")
    assert code == 2
    assert "no-such-folder" in out
    assert "Traceback" not in err
