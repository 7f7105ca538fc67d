"""The import rules of DESIGN 8, read from the source of every module."""

import ast
from functools import cache
from pathlib import Path

import pytest

import kvaudit

PACKAGE = Path(kvaudit.__file__).parent
FAMILIES = ("policies", "engines", "traces", "reports")
PURE = {
    "records": set(),
    "errors": set(),
    "orders": {"records", "errors"},
    "rows": {"records"},
    "analysis.compare": {"records", "errors", "schema"},
    "analysis.stats": set(),
}
REDACTION_IN_TRACES = {"redaction.requests"}
"""Knows what a request and a segment are; everything else of the package knows texts only."""
BELOW_ANALYSIS = {"records", "errors", "schema"}
INPUT_OUTPUT = {"os", "io", "pathlib", "shutil", "tempfile", "subprocess", "socket", "urllib", "filelock", "orjson"}


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def statements(tree):
    """Import statements, without those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from statements(node)


def targets(node):
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    assert node.level == 0, "relative imports hide where an arrow goes"
    below = [f"{node.module}.{name}" for name in names]
    return [target if target.removeprefix("kvaudit.") in MODULES else node.module for target in below]


@cache
def imports(module):
    """What a module imports, anywhere in it, by full name."""
    tree = ast.parse(MODULES[module].read_text())
    return frozenset(target for node in statements(tree) for target in targets(node))


def ours(module):
    return {target.partition(".")[2] for target in imports(module) if target.partition(".")[0] == "kvaudit"}


def test_the_package_was_found():
    assert {"records", "replay", "store", "cli", "engines.embedded", "policies"} <= set(MODULES)


@pytest.mark.parametrize(("module", "allowed"), PURE.items())
def test_pure_modules_import_only_what_lies_below_them(module, allowed):
    assert ours(module) <= allowed


@pytest.mark.parametrize("module", sorted({*PURE, *(name for name in MODULES if name.startswith("analysis."))}))
def test_pure_modules_touch_neither_files_nor_models(module):
    assert {name for name in ours(module) if not name.startswith("analysis.")} <= BELOW_ANALYSIS | {"analysis"}
    assert not {target.partition(".")[0] for target in imports(module)} & {*INPUT_OUTPUT, "torch", "transformers"}


def test_redaction_knows_texts_and_neither_files_nor_traces():
    found = {name for name in MODULES if name.startswith("redaction.")} - REDACTION_IN_TRACES
    assert {"redaction.detectors", "redaction.keys", "redaction.scans"} <= found
    for module in found:
        assert {name for name in ours(module) if not name.startswith("redaction")} <= {"errors"}
        paths_of_others = {"pathlib"} if module in ("redaction.builtin", "redaction.keys") else set()
        reached = {target.partition(".")[0] for target in imports(module)}
        assert not reached & ({*INPUT_OUTPUT, "torch", "transformers"} - paths_of_others)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_members_do_not_import_each_other(family):
    """A member is a module or a folder that the table of plug-ins names; what they share are other modules."""
    from kvaudit.plugins import BUILT_IN

    members = {plugin.target.partition(":")[0].removeprefix("kvaudit.") for plugin in BUILT_IN[family].values()}
    for member in members:
        inside = {name for name in MODULES if name == member or name.startswith(f"{member}.")}
        others = members - {member}
        reached = {target for name in inside for target in ours(name)}
        assert not {target for target in reached for other in others if f"{target}.".startswith(f"{other}.")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_protocol_does_not_import_its_members(family):
    from kvaudit.plugins import BUILT_IN

    members = {plugin.target.partition(":")[0].removeprefix("kvaudit.") for plugin in BUILT_IN[family].values()}
    assert not ours(family) & members


def test_only_engines_that_run_a_model_import_torch():
    users = {
        name
        for name in MODULES
        if {target.partition(".")[0] for target in imports(name)} & {"torch", "transformers", "safetensors", "gguf"}
    }
    assert users
    assert all(name.startswith(("engines.embedded", "engines.vllm", "models.")) for name in users)


def test_only_the_real_engines_import_vllm_and_lmcache():
    users = {name for name in MODULES if {target.partition(".")[0] for target in imports(name)} & {"vllm", "lmcache"}}
    assert users
    assert all(name.startswith("engines.vllm") for name in users)


def test_nobody_imports_the_command_line():
    users = {name for name in MODULES if any(target.partition(".")[0] == "cli" for target in ours(name))}
    assert all(name == "__main__" or name.partition(".")[0] == "cli" for name in users)


def test_there_are_no_cycles():
    left = {name: ours(name) & set(MODULES) - {name} for name in MODULES}
    while free := {name for name, below in left.items() if not below & set(left)}:
        left = {name: below for name, below in left.items() if name not in free}
    assert not left
