import os
from pathlib import Path

import pytest

from kvaudit.analysis.gates import NonInferiority
from kvaudit.cli.gate_files import Wanted, non_inferiority, wanted_gates
from kvaudit.errors import UsageError

PYPROJECT = "[project]\nname = 'service'\n"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def wanted(file: Path | None = None, baseline: Path | None = None, **given) -> Wanted:
    return wanted_gates(file, given, baseline)


def refused(text: str, name: str = "kvaudit.toml") -> str:
    Path(name).write_text(text)
    with pytest.raises(UsageError) as caught:
        wanted(Path(name))
    assert name in caught.value.message
    return str(caught.value)


def test_every_key_is_read():
    Path("kvaudit.toml").write_text(
        """
        [gates]
        min-fidelity = 0.95
        max-variation = 0.02
        policies = ["document-aligned"]
        non-inferior = [{ policy = "document-aligned", than = "token-topk", margin = 0.02 }]
        baseline = "runs/last"
        max-fidelity-drop = 0.01
        max-variation-rise = 0
        """
    )
    gates, baseline = wanted()
    assert (gates.min_fidelity, gates.max_variation, gates.policies) == (0.95, 0.02, ("document-aligned",))
    assert gates.non_inferior == (NonInferiority("document-aligned", "token-topk", 0.02),)
    assert (gates.max_fidelity_drop, gates.max_variation_rise) == (0.01, 0.0)
    assert baseline is not None
    assert baseline.resolve() == Path("runs/last").resolve()
    assert gates.source is not None
    assert gates.source.endswith("kvaudit.toml")


def test_pyproject_has_its_own_table():
    Path("pyproject.toml").write_text(f"{PYPROJECT}[tool.kvaudit.gates]\nmin-fidelity = 0.9\n")
    assert wanted().gates.min_fidelity == 0.9


def test_a_pyproject_without_gates_is_somebody_else_s():
    Path("pyproject.toml").write_text(f"{PYPROJECT}[tool.ruff]\nline-length = 99\n")
    assert not wanted().gates.any


def test_the_nearest_file_counts(tmp_path, monkeypatch):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    Path("kvaudit.toml").write_text("[gates]\nmin-fidelity = 0.9\nbaseline = 'runs/x'\n")
    monkeypatch.chdir(below)
    gates, baseline = wanted()
    assert gates.min_fidelity == 0.9
    assert baseline == tmp_path / "runs/x"
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.kvaudit.gates]\nmin-fidelity = 0.8\n")
    assert wanted().gates.min_fidelity == 0.8
    (below / "pyproject.toml").write_text(PYPROJECT)
    assert wanted().gates.min_fidelity == 0.8


def test_options_override_the_file_key_by_key():
    Path("kvaudit.toml").write_text("[gates]\nmin-fidelity = 0.9\nmax-variation = 0.1\nbaseline = 'old'\n")
    gates, baseline = wanted(baseline=Path("new"), min_fidelity=0.5, max_variation=None)
    assert (gates.min_fidelity, gates.max_variation, baseline) == (0.5, 0.1, Path("new"))


def test_a_named_file_replaces_the_nearest():
    Path("kvaudit.toml").write_text("[gates]\nmin-fidelity = 0.9\n")
    Path("strict.toml").write_text("[gates]\nmax-variation = 0\n")
    gates = wanted(Path("strict.toml")).gates
    assert (gates.min_fidelity, gates.max_variation, gates.source) == (None, 0.0, "strict.toml")


def test_without_a_file_there_are_only_options():
    gates, baseline = wanted(max_variation=0.1)
    assert (gates.max_variation, gates.source, baseline) == (0.1, None, None)


def test_two_files_in_one_folder_are_refused():
    Path("kvaudit.toml").write_text("[gates]\nmin-fidelity = 0.9\n")
    Path("pyproject.toml").write_text("[tool.kvaudit.gates]\nmin-fidelity = 0.8\n")
    with pytest.raises(UsageError, match="both set gates"):
        wanted()


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("[gates]\nmin-fidelty = 0.9", "kvaudit.toml", "gates.min-fidelty"),
        ("[gates]\nmin_fidelity = 0.9", "kvaudit.toml", "gates.min_fidelity"),
        ("[gate]\nmin-fidelity = 0.9", "kvaudit.toml", "gate"),
        ("min-fidelity = 0.9", "kvaudit.toml", "min-fidelity"),
        ("[tool.kvaudit.gate]\nmin-fidelity = 0.9", "pyproject.toml", "tool.kvaudit.gate"),
        ("[tool.kvaudit]\nmin-fidelity = 0.9", "pyproject.toml", "tool.kvaudit.min-fidelity"),
        (
            "[[gates.non-inferior]]\npolicy = 'a'\nthan = 'b'\nmargin = 0.1\npoints = 1",
            "kvaudit.toml",
            "gates.non-inferior.points",
        ),
    ],
)
def test_an_unknown_key_is_an_error_that_names_it(text, name, key):
    assert f"unknown key {key} (known: " in refused(text, name)


@pytest.mark.parametrize(
    "text",
    [
        "min-fidelity = '0.9'",
        "min-fidelity = true",
        "min-fidelity = 95",
        "max-variation = -0.1",
        "max-variation = nan",
        "policies = 'token-topk'",
        "policies = []\nmin-fidelity = 0.5",
        "policies = [1]",
        "baseline = 3",
        "baseline = ''",
        'baseline = "a\\u0000b"',
        "non-inferior = ['a', 'b', 0.1]",
        "non-inferior = [{ policy = 'a', than = 'b' }]",
        "non-inferior = [{ policy = 'a', than = 'b', margin = '2 %' }]",
        "non-inferior = [{ policy = 'a', than = 'a', margin = 0.1 }]",
    ],
)
def test_a_value_of_another_kind_is_an_error(text):
    refused(f"[gates]\n{text}\n")


@pytest.mark.parametrize("text", ["", "[gates]", "[gates]\npolicies = ['a']", "gates = 3", "[gates", "\x00"])
def test_a_file_that_sets_no_limit_is_an_error(text):
    refused(text)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    for path in (Path("missing.toml"), tmp_path, Path("/dev/zero")):
        with pytest.raises(UsageError, match="no file that can be read"):
            wanted(path)
    Path("latin.toml").write_bytes(b"[gates]\n# caf\xe9\n")
    with pytest.raises(UsageError, match="no TOML"):
        wanted(Path("latin.toml"))


@pytest.mark.parametrize("made", ["dangling", "loop", "folder", "pipe"])
def test_a_gate_file_that_is_no_file_is_not_taken_for_none(made):
    path = Path("kvaudit.toml")
    if made == "folder":
        path.mkdir()
    elif made == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere" if made == "dangling" else path.name)
    with pytest.raises(UsageError, match="no file that can be read"):
        wanted()


@pytest.mark.parametrize(
    "heading",
    ["gates", "kvaudit.gates", "tools.kvaudit.gates", "tool.KVAUDIT.gates", "tool.kv-audit.gates", "tool.kvaudits"],
)
def test_a_misspelt_table_is_an_error(heading):
    Path("pyproject.toml").write_text(f"{PYPROJECT}[{heading}]\nmin-fidelity = 0.9\n")
    with pytest.raises(UsageError, match="sets no gates"):
        wanted()


def test_a_misspelt_file_name_is_an_error():
    Path("KVaudit.toml").write_text("[gates]\nmin-fidelity = 0.9\n")
    with pytest.raises(UsageError, match="would set no gates"):
        wanted()


def test_other_tools_are_nobody_s_gates():
    Path("pyproject.toml").write_text(f"{PYPROJECT}[tool.audit]\nx = 1\n[tool.vault]\nx = 1\n")
    assert not wanted().gates.any
    Path("pyproject.toml").write_text("tool = 1\n")
    assert not wanted().gates.any


def test_a_byte_order_mark_is_no_part_of_the_file():
    Path("kvaudit.toml").write_bytes(b"\xef\xbb\xbf[gates]\nmin-fidelity = 0.9\n")
    assert wanted().gates.min_fidelity == 0.9


@pytest.mark.parametrize("digits", [400, 5_000])
def test_numbers_that_fit_nowhere_are_refused(digits):
    refused(f"[gates]\nmin-fidelity = {'9' * digits}\n")
    refused(f"[gates]\nnon-inferior = [{{ policy = 'a', than = 'b', margin = {'9' * digits} }}]\n")


def test_an_option_can_complete_a_file():
    Path("kvaudit.toml").write_text("[gates]\npolicies = ['a']\n")
    assert wanted(min_fidelity=0.5).gates.policies == ("a",)


@pytest.mark.parametrize("given", [{"policies": ("a",)}, {"policies": ("a",), "non_inferior": ()}])
def test_policies_without_a_limit_are_refused(given):
    with pytest.raises(UsageError, match="no limit"):
        wanted(**given)


def test_non_inferiority_on_the_command_line():
    assert non_inferiority("legolink:k=8,token-topk,0.02") == NonInferiority("legolink:k=8", "token-topk", 0.02)
    assert non_inferiority("a:k=8,m=2,b:k=1,m=0,0.02") == NonInferiority("a:k=8,m=2", "b:k=1,m=0", 0.02)
    assert non_inferiority("a,b,0") == NonInferiority("a", "b", 0.0)


@pytest.mark.parametrize("text", ["", "a", "a,b", "a,b,", "a,b,much", ",b,0.1", "a,,0.1", "a,b,2"])
def test_non_inferiority_that_cannot_be_read_is_refused(text):
    from kvaudit.analysis.gates import Gates

    with pytest.raises(UsageError):
        Gates(non_inferior=(non_inferiority(text),))
