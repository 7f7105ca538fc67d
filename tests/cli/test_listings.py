import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from kvaudit import cli, plugins
from kvaudit.policies import Policy


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
        assert plugin.needs in ("", "nothing") or line.endswith(f"; needs {plugin.needs}")
        assert "BROKEN" not in line


def test_a_policy_says_how_closely_it_follows_what_and_takes_which_parameters(lines):
    shown = {line.split()[0]: line for line in lines("policies")}
    for name, plugin in plugins.available("policies").items():
        assert plugin.standing in ("exact", "port", "described", "control")
        assert f"; {plugin.standing}" in shown[name]
        assert plugin.source in shown[name]
    assert "; parameters: m=4 [int]; " in shown["token-runs"]
    assert "parameters" not in shown["token-topk"]


@pytest.mark.parametrize("family", ["policies", "engines"])
@pytest.mark.parametrize("columns", [60, 80, 300])
def test_at_a_terminal_lines_are_wrapped_under_each_other(lines, family, columns, monkeypatch):
    piped = lines(family)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = lines(family)
    assert max(map(len, shown)) <= min(columns, 120)
    indent = min(len(line) - len(line.lstrip()) for line in shown if line.startswith(" "))
    assert all(line[:indent].rstrip() in ("", line.split()[0]) for line in shown)
    names = [line.split()[0] for line in shown if not line.startswith(" ")]
    assert names == [line.split()[0] for line in piped]
    joined = "".join("".join(line[indent:] for line in shown).split())
    told = [part for line in piped for part in line.partition(" ")[2].split("; ")]
    assert all("".join(part.split()) in joined for part in told)


@pytest.mark.parametrize("family", ["policies", "engines"])
def test_lines_stand_in_columns_and_carry_no_escape_codes(lines, family):
    shown = lines(family)
    starts = {len(line) - len(line.split(maxsplit=1)[1]) for line in shown}
    assert len(starts) == 1
    assert not any("\x1b" in line for line in shown)


class Bare(Policy):
    name = "bare"

    def select(self, context):
        raise AssertionError("it is only listed")


@dataclass
class Documented(Bare):
    """Says what it does.

    And more.
    """

    k: int
    needs = frozenset({"value-deviation", "deviation"})

    name = "documented"


@dataclass
class Undocumented(Bare):
    name = "undocumented"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bare", "a policy without a docstring; from test_listings:Bare; needs deviation"),
        (
            "documented",
            "Says what it does; from test_listings:Documented; parameters: k (int) [int]; "
            "needs deviation, value-deviation",
        ),
        ("undocumented", "a policy without a docstring; from test_listings:Undocumented; needs deviation"),
    ],
)
def test_a_policy_from_outside_is_listed(lines, from_outside, name, told):
    from_outside("policies", name, f"test_listings:{name.capitalize()}")
    assert lines("policies")[-1].split(maxsplit=1) == [name, told]


def test_an_engine_from_outside_is_listed(lines, from_outside):
    from_outside("engines", "mine", "kvaudit.engines.scripted:open_engine")
    assert lines("engines")[-1].split(maxsplit=1) == ["mine", "from kvaudit.engines.scripted:open_engine"]


@pytest.mark.parametrize("family", ["policies", "engines"])
def test_an_entry_point_whose_name_is_taken_is_told(lines, from_outside, family):
    name = next(iter(plugins.BUILT_IN[family]))
    from_outside(family, name, "nowhere.to:be_found")
    shown = lines(family)
    assert "BROKEN" not in shown[0]
    assert shown[-1].split(maxsplit=1) == [name, "BROKEN: nowhere.to:be_found is ignored: the name is taken"]


def test_a_name_cannot_drive_the_terminal(lines, from_outside):
    from_outside("policies", "red\x1b[31m\nline", "nowhere.to:be_found")
    assert lines("policies")[-1].startswith("red\\x1b[31m\\nline")


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
    assert [line.split()[0] for line in others] == ["embedded", "vllm", "lmcache", "server", "scripted"]
    assert broken.startswith("theirs    BROKEN: engine 'theirs'")
    assert reason in broken
