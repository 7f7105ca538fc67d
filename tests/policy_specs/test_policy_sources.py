"""What a policy's source digest covers: a change of it is another audit, a change elsewhere is not."""

import functools
import importlib
import sys

import pytest

from kvaudit.policies.legolink import LegoLink
from kvaudit.policies.tokens import TokenTopK
from kvaudit.policy_specs import sources
from kvaudit.policy_specs.sources import source_digest

PACKAGE = {
    "pack/__init__.py": "",
    "pack/policies/__init__.py": "from pack.constants import LENGTH",
    "pack/policies/mine.py": "from . import ranking\nfrom ..deep.tools import tool\n\nclass Mine:\n    pass\n",
    "pack/policies/ranking.py": "def rank():\n    import pack.late\n",
    "pack/constants.py": "LENGTH = 1",
    "pack/deep/__init__.py": "",
    "pack/deep/tools.py": "def tool(): pass",
    "pack/late.py": "LATE = 1",
    "pack/unused.py": "UNUSED = 1",
    "other/__init__.py": "OTHER = 1",
}
MODULES = {
    "mine.py": "import helpers\nfrom kit.deep import DEEP\n\nclass Mine:\n    pass\n",
    "helpers.py": "VALUE = 1",
    "kit/__init__.py": "",
    "kit/deep.py": "DEEP = 1",
    "unused.py": "UNUSED = 1",
}


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Writes files into a folder that can be imported from, and imports a module out of it."""
    before = set(sys.modules)

    def written(files, module, folder="src"):
        for name, text in files.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path / folder)
        importlib.invalidate_caches()
        return tmp_path / folder, importlib.import_module(module)

    yield written
    for name in set(sys.modules) - before:
        del sys.modules[name]


def changes_with(path, loaded):
    """Whether the digest changes when the file does."""
    before, text = source_digest(loaded), path.read_text()
    path.write_text(text + "\n# changed\n")
    after = source_digest(loaded)
    path.write_text(text)
    assert None not in (before, after)
    return before != after


def test_a_package_is_covered_as_far_as_the_policy_imports_it(imported):
    folder, module = imported(PACKAGE, "pack.policies.mine")
    covered = {name for name in PACKAGE if changes_with(folder / name, module.Mine)}
    assert covered == set(PACKAGE) - {"pack/unused.py", "other/__init__.py"}


def test_a_module_alone_is_covered_with_what_it_imports_from_beside_it(imported):
    folder, module = imported(MODULES, "mine")
    covered = {name for name in MODULES if changes_with(folder / name, module.Mine)}
    assert covered == set(MODULES) - {"unused.py"}


def test_what_lies_beside_a_package_is_covered_as_far_as_it_is_imported(imported):
    beside = {"toplevel.py": "from kit import deep", "kit/__init__.py": "", "kit/deep.py": "", "alone.py": ""}
    late = {"pack/late.py": "import toplevel\nimport json"}
    folder, module = imported({**PACKAGE, **late, **beside}, "pack.policies.mine")
    assert {name for name in beside if changes_with(folder / name, module.Mine)} == set(beside) - {"alone.py"}


def test_what_lies_beside_an_installed_package_is_not_its_own(imported):
    beside = {"toplevel.py": "", "kit/__init__.py": ""}
    late = {"pack/late.py": "import toplevel, kit"}
    folder, module = imported({**PACKAGE, **late, **beside}, "pack.policies.mine", "site-packages")
    assert not any(changes_with(folder / name, module.Mine) for name in beside)
    assert changes_with(folder / "pack/late.py", module.Mine)


def test_a_module_that_is_imported_by_a_call_with_its_name_is_covered(imported):
    text = (
        "import importlib\nfrom importlib import import_module\nname = 'pack.computed'\n\nclass Mine:\n"
        "    def select(self):\n        importlib.import_module('pack.called')\n        __import__('pack.inner')\n"
        "        import_module('..relative', __package__)\n        import_module(name)\n        import_module()\n"
        "        import_module('/etc/nothing')\n        import_module('..')\n        import_module(3)\n"
    )
    called = {f"pack/{name}.py": "" for name in ("called", "inner", "relative", "computed")}
    folder, module = imported({**PACKAGE, **called, "pack/policies/mine.py": text}, "pack.policies.mine")
    covered = {name for name in called if changes_with(folder / name, module.Mine)}
    assert covered == set(called) - {"pack/computed.py"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": "A = 1\nB = 1\n", "b": "C = 1\n"}, {"a": "A = 1\n", "b": "B = 1\nC = 1\n"}),
        ({"a": "A = 1\n", "b": ""}, {"a": "", "b": "A = 1\n"}),
    ],
)
def test_what_moves_from_one_module_to_the_next_changes_the_digest(imported, before, after):
    mine = {"mine.py": "import a, b\n\nclass Mine:\n    pass\n"}
    folder, module = imported(mine | {f"{name}.py": text for name, text in before.items()}, "mine")
    digests = [source_digest(module.Mine)]
    for name, text in after.items():
        (folder / f"{name}.py").write_text(text)
    digests.append(source_digest(module.Mine))
    assert len(set(digests)) == 2


def test_installed_packages_beside_a_module_are_not_its_own(imported):
    folder, module = imported(MODULES, "mine", "site-packages")
    covered = {name for name in MODULES if changes_with(folder / name, module.Mine)}
    assert covered == {"mine.py", "helpers.py"}


def test_a_digest_does_not_depend_on_where_the_files_lie(imported, tmp_path):
    digests = set()
    for folder in ("here", "there/deeper"):
        _, module = imported(PACKAGE, "pack.policies.mine", folder)
        digests.add(source_digest(module.Mine))
        for name in [name for name in sys.modules if name.partition(".")[0] == "pack"]:
            del sys.modules[name]
    assert len(digests) == 1


def test_kvaudits_own_policies_are_covered_with_what_they_rank_by(monkeypatch):
    """Byte by byte: without the shared module the digest is another one."""
    with_ranking = source_digest(TokenTopK)
    reached = sources._reached
    monkeypatch.setattr(sources, "_reached", lambda *where: {f for f in reached(*where) if f.name != "ranking.py"})
    assert source_digest(TokenTopK) != with_ranking
    assert source_digest(TokenTopK) != source_digest(LegoLink)


def test_a_file_that_cannot_be_parsed_any_more_counts_with_its_bytes(imported):
    folder, module = imported(PACKAGE, "pack.policies.mine")
    before = source_digest(module.Mine)
    (folder / "pack/policies/ranking.py").write_text("def (")
    assert source_digest(module.Mine) not in (before, None)


def test_without_a_file_there_is_no_digest(imported):
    folder, module = imported({"mine.py": "class Mine:\n    pass\n"}, "mine")
    assert source_digest(module.Mine) is not None
    (folder / "mine.py").unlink()
    assert source_digest(module.Mine) is None
    assert source_digest(functools.partial(module.Mine)) is source_digest(int) is None
