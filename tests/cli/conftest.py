"""The command line as tests of several commands run it."""

import sys

import pytest

from kvaudit import cli


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
