import subprocess
import sys

import pytest

from kvaudit import cli
from kvaudit.schema.reference import as_markdown


def test_the_command_prints_the_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvaudit", "schema"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr() == (as_markdown(), "")


def test_a_reader_that_stops_after_a_line_is_no_error():
    command = [sys.executable, "-m", "kvaudit", "schema"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"# Tables of a kvaudit run\n"
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode in (0, 141)


def test_a_pipe_without_an_encoding_gets_the_whole_page(tmp_path):
    environment = {"PATH": "", "PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-m", "kvaudit", "schema"], capture_output=True, check=True, env=environment)
    assert ran.stdout.decode() == as_markdown()
