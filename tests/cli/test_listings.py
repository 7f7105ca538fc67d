import sys
from importlib.metadata import EntryPoint

import pytest

from kvaudit import cli, plugins


@pytest.fixture
def lines(monkeypatch, capsys):
    def run(command):
        monkeypatch.setattr(sys, "argv", ["kvaudit", command])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def from_outside(monkeypatch):
    def bring(family, name, target):
        def entry_points(group):
            return [EntryPoint(name, target, group)] if group == f"kvaudit.{family}" else []

        monkeypatch.setattr(plugins, "entry_points", entry_points)

    return bring


@pytest.mark.parametrize("family", ["policies", "engines"])
def test_each_plugin_has_a_line_with_what_it_does_and_needs(lines, family):
    known = plugins.available(family)
    shown = lines(family)
    assert [line.split()[0] for line in shown] == list(known)
    for line, plugin in zip(shown, known.values(), strict=True):
        assert plugin.summary in line
        assert plugin.needs == "nothing" or line.endswith(f"; needs {plugin.needs}")
        assert "BROKEN" not in line


@pytest.mark.parametrize("family", ["policies", "engines"])
def test_lines_stand_in_columns_and_carry_no_escape_codes(lines, family):
    shown = lines(family)
    starts = {len(line) - len(line.split(maxsplit=1)[1]) for line in shown}
    assert len(starts) == 1
    assert not any("\x1b" in line for line in shown)


def test_a_plugin_from_outside_is_listed(lines, from_outside):
    from_outside("policies", "mine", "kvaudit.policies.bounds:ReuseAll")
    assert lines("policies")[-1].split(maxsplit=1) == ["mine", "from kvaudit.policies.bounds:ReuseAll"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("nowhere.to:be_found", "No module named 'nowhere'"),
        ("kvaudit.policies.bounds:Absent", "has no attribute 'Absent'"),
    ],
)
def test_a_broken_plugin_is_listed_by_name_beside_the_others(lines, from_outside, target, reason):
    from_outside("engines", "theirs", target)
    *others, broken = lines("engines")
    assert len(others) == 2
    assert broken.startswith("theirs    BROKEN: engine 'theirs'")
    assert reason in broken
