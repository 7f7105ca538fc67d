"""Policies as they are asked for on the command line."""

from __future__ import annotations

import sys
import textwrap
from hashlib import sha256
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvaudit import plugins
from kvaudit.errors import KvauditError, PluginError, PolicyError, UsageError
from kvaudit.plugins import BUILT_IN
from kvaudit.policies.controls import TokenRuns
from kvaudit.policies.tokens import TokenTopK
from kvaudit.policy_specs import policy_class, read_policies, read_policy

MINE = """
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvaudit.policies import Policy


@dataclass(frozen=True, slots=True)
class Mine(Policy):
    alpha: float = 0.5
    mode: Literal["mean", "max"] = "mean"

    name: ClassVar[str] = "mine"

    def __post_init__(self) -> None:
        if self.alpha < 0:
            raise ValueError("alpha is below 0")

    def select(self, context):
        return context.positions[: context.k]


class Other(Mine):
    name: ClassVar[str] = "other"


class Half(Policy):
    name: ClassVar[str] = "half"


NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """Entry points of packages that are installed, as (name, target)."""

    def bring(*points):
        monkeypatch.setattr(
            plugins,
            "entry_points",
            lambda group: [EntryPoint(*point, group) for point in points] if group == "kvaudit.policies" else [],
        )

    return bring


def with_class(folder: Path, body: str, imports: str = "") -> str:
    """A file with a policy of this body; its spec."""
    lines = f"{imports}\nfrom kvaudit.policies import Policy\n\nclass It(Policy):\n{textwrap.indent(body, '    ')}\n"
    (folder / "it.py").write_text(lines)
    return "./it.py:It"


SELECT = "\ndef select(self, context):\n    return context.positions[: context.k]\n"


@pytest.mark.parametrize("name", BUILT_IN["policies"])
def test_a_built_in_policy_is_its_name(name):
    spec = read_policy(name)
    assert (spec.name, spec.base, spec.parameters) == (name, name, {})
    assert spec.target == BUILT_IN["policies"][name].target
    assert spec.make() == spec.make()
    assert spec.make().name == name


def test_parameters_stand_in_the_name_where_they_differ():
    assert [read_policy(text).name for text in ("token-runs:m=4", "token-runs:m=016", "token-runs:")] == [
        "token-runs",
        "token-runs:m=16",
        "token-runs",
    ]
    assert read_policy("token-runs:m=16").make() == TokenRuns(m=16)


def test_a_policy_out_of_a_file_is_named_by_its_class(folder):
    spec = read_policy("./mine.py:Mine:mode=max,alpha=0.250")
    assert spec.name == "mine:alpha=0.25,mode=max"
    assert spec.target == "./mine.py:Mine"
    assert spec.source == sha256(MINE.encode()).hexdigest()
    assert spec.values() == {"alpha": "0.25", "mode": "max"}
    made = spec.make()
    assert (made.name, made.alpha, made.mode) == ("mine", 0.25, "max")
    assert read_policy(f"{folder}/mine.py:Mine").values() == {"alpha": "0.5", "mode": "mean"}
    assert read_policy("mine.py:Mine").name == "mine"


def test_a_policy_out_of_a_module_is_named_by_its_class(folder, monkeypatch):
    (folder / "a_package").mkdir()
    (folder / "mine.py").rename(folder / "a_package" / "of_mine.py")
    (folder / "top_level_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(folder))
    try:
        assert read_policy("a_package.of_mine:Mine:alpha=2").name == "mine:alpha=2.0"
        assert read_policy("top_level_mine:Other").name == "other"
        assert read_policy("top_level_mine:Other").source == sha256(MINE.encode()).hexdigest()
        with pytest.raises(UsageError, match=r"'a_package.of_mine' names no class") as refused:
            read_policy("a_package.of_mine")
        assert refused.value.hint == "write a_package.of_mine:Mine or a_package.of_mine:Other or a_package.of_mine:Half"
    finally:
        for name in ("a_package.of_mine", "a_package", "top_level_mine"):
            sys.modules.pop(name, None)


def test_an_entry_point_is_its_name(installed, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    (folder / "mine.py").rename(folder / "of_mine.py")
    installed(("mine", "of_mine:Mine"))
    try:
        assert read_policy("mine:alpha=1").name == "mine:alpha=1.0"
        assert read_policy("mine").target == "of_mine:Mine"
        assert [spec.name for spec in read_policies(["mine", "of_mine:Mine"])] == ["mine"], "one class, one policy"
        with pytest.raises(UsageError, match="'mine:Mine' is no policy"):
            read_policy("mine:Mine")
    finally:
        sys.modules.pop("of_mine", None)


@pytest.mark.parametrize(
    ("text", "error", "message", "hint"),
    [
        ("luck", UsageError, "unknown policy 'luck'", "known: token-topk"),
        ("luck:k=1", UsageError, "unknown policy 'luck'", "known: "),
        ("", UsageError, "unknown policy ''", "known: "),
        ("./", UsageError, "unknown policy './'", "known: "),
        ("a-b:Class", UsageError, "unknown policy 'a-b'", "known: "),
        ("token-runs:8", UsageError, "'token-runs:8' is no policy", "parameters are written token-runs:NAME=VALUE"),
        ("token-runs:q=8", UsageError, "policy 'token-runs' has no parameter 'q'", "it has m=4"),
        ("token-topk:k=8", UsageError, "policy 'token-topk' has no parameter 'k'", "it has none"),
        ("token-runs:m=-1", UsageError, "policy 'token-runs': m is -1", "it is 0 or more"),
        ("none.py:X", UsageError, "there is no file none.py", "give the file"),
        ("./mine.py", UsageError, "'./mine.py' names no class", "write ./mine.py:Mine or ./mine.py:Other"),
        ("./mine.py:", UsageError, "'./mine.py:' names no class", "write ./mine.py:Mine"),
        ("./mine.py:alpha=1", UsageError, "'./mine.py:alpha=1' names no class", "write ./mine.py:Mine"),
        ("./mine.py:Yours", UsageError, "./mine.py has no 'Yours'", "write ./mine.py:Mine"),
        ("./mine.py:NUMBER", PluginError, "policy 'NUMBER' (./mine.py:NUMBER) is no subclass of", "derive it"),
        ("./mine.py:ClassVar", PluginError, "policy 'ClassVar' (./mine.py:ClassVar) is no subclass of", "derive it"),
        ("./mine.py:Half", UsageError, "policy 'half' cannot be made: TypeError: Can't instantiate abstract", "give"),
        ("./mine.py:Mine:alpha=-1", UsageError, "policy 'mine:alpha=-1.0' cannot be made: ValueError: alpha", "give"),
        ("./mine.py:Mine:beta=1", UsageError, "policy 'mine' has no parameter 'beta'", "it has alpha=0.5, mode=mean"),
        ("no.such.place:X", PluginError, "module 'no.such.place' cannot be imported: ModuleNotFoundError", "install"),
        ("json:JSONDecoder", PluginError, "policy 'JSONDecoder' (json:JSONDecoder) is no subclass of", "derive it"),
        (
            "kvaudit.policies.tokens:TokenTopK",
            UsageError,
            "kvaudit.policies.tokens:TokenTopK has the name of kvaudit's own policy 'token-topk'",
            "write --policy token-topk",
        ),
        ("kvaudit.policies:Policy", PluginError, "policy 'Policy' (kvaudit.policies:Policy) has no `name`", "give"),
        (f"token-runs:m={'9' * 160}", UsageError, "the policy's name is too long to name a file", "give it fewer"),
    ],
)
def test_what_cannot_be_is_one_clear_error(folder, text, error, message, hint):
    with pytest.raises(KvauditError) as refused:
        read_policy(text)
    assert type(refused.value) is error
    assert refused.value.exit_code == 2
    assert refused.value.message.startswith(message)
    assert refused.value.hint.startswith(hint)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["Mine", "my mine", "mine:k", "mine.k", "../mine", "", "-x", "é", "x" * 65, "full-prefill"]
)
def test_a_name_that_is_none_is_refused(folder, name):
    with pytest.raises(PluginError, match=r"has the name .*, which is reserved or no name of a policy"):
        read_policy(with_class(folder, f"name = {name!r}{SELECT}"))


@pytest.mark.parametrize(
    ("body", "what"), [("needs = {'luck'}", "needs 'luck'"), ("start = 'last-layer'", "start 'last-layer'")]
)
def test_a_declaration_that_no_engine_knows_is_refused(folder, body, what):
    with pytest.raises(PluginError, match=rf"policy 'it' \(./it.py:It\) declares {what}"):
        read_policy(with_class(folder, f"name = 'it'\n{body}{SELECT}"))


def test_needs_that_are_no_set_are_refused(folder):
    with pytest.raises(PluginError, match=r"policy 'it' \(./it.py:It\): its needs are no set"):
        read_policy(with_class(folder, f"name = 'it'\nneeds = ['deviation']{SELECT}"))


def test_a_plug_in_with_the_name_of_a_built_in_policy_is_told_what_to_do(folder):
    with pytest.raises(UsageError, match=r"./it.py:It has the name of kvaudit's own policy 'all'") as refused:
        read_policy(with_class(folder, f"name = 'all'{SELECT}"))
    assert refused.value.hint == "give the class another `name`"


@pytest.mark.parametrize("raised", ["SystemExit(0)", "RuntimeError('no table')"])
def test_a_constructor_that_refuses_is_named(folder, raised):
    with pytest.raises(UsageError, match=rf"policy 'it' cannot be made: {raised.partition('(')[0]}"):
        read_policy(with_class(folder, f"name = 'it'\ndef __init__(self):\n    raise {raised}{SELECT}"))


def test_a_constructor_that_refuses_later_is_the_policys_fault(folder):
    body = f"name = 'it'\nmade = []\ndef __init__(self):\n    self.made.append(1)\n    1 / (2 - len(self.made)){SELECT}"
    spec = read_policy(with_class(folder, body))
    with pytest.raises(PolicyError, match="policy 'it' cannot be made: ZeroDivisionError") as refused:
        spec.make()
    assert refused.value.exit_code == 3


def test_a_policy_is_read_once_however_it_is_written():
    texts = ["token-runs:m=4", "token-runs", "token-topk", "token-runs:m=08", "token-runs:m=8"]
    assert [spec.name for spec in read_policies(texts)] == ["token-runs", "token-topk", "token-runs:m=8"]


def test_two_policies_of_one_name_are_refused(folder):
    (folder / "again.py").write_text(MINE)
    for second in ("./again.py:Mine", "./again.py:Mine:alpha=1"):
        with pytest.raises(UsageError, match=r"./mine.py:Mine and ./again.py:Mine are both named 'mine'") as refused:
            read_policies(["./mine.py:Mine", second])
        assert refused.value.hint == "give one of the classes another `name`"


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (("theirs", "json:JSONDecoder"), r"policy 'theirs' \(json:JSONDecoder\) is no subclass of"),
        (("theirs", "nowhere.to:be_found"), r"policy 'theirs' \(nowhere.to:be_found\) cannot be loaded: No module"),
        (("theirs", "json"), r"policy 'theirs' \(json\) cannot be loaded"),
        (("theirs", "kvaudit.policies.tokens:TokenTopK"), r"policy 'theirs' .* calls itself 'token-topk'"),
    ],
)
def test_an_entry_point_that_is_no_policy_is_one_clear_error(installed, point, message):
    installed(point)
    with pytest.raises(PluginError, match=message):
        policy_class("theirs")
    with pytest.raises(PluginError, match=message):
        read_policy("theirs:k=1")


def test_an_entry_point_cannot_take_the_name_of_a_built_in_policy(installed):
    installed(("token-topk", "json:JSONDecoder"))
    assert policy_class("token-topk") is TokenTopK
