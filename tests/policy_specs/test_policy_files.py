"""Policies out of files: imported alone, named by nothing that others could find, and nothing left behind."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path

import pytest

from kvaudit.errors import PluginError, UsageError
from kvaudit.policy_specs.files import import_file


@pytest.fixture
def folder(tmp_path):
    """Python writes byte code, as it does for users, and in the end nothing of the imports is left."""
    path, modules, bytecode = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.dont_write_bytecode = False
    yield tmp_path
    left, sys.dont_write_bytecode = sys.dont_write_bytecode, bytecode
    assert (sys.path, left) == (path, False)
    assert all(name.startswith("_kvaudit_policy_") for name in set(sys.modules) - modules)
    assert [str(found) for found in tmp_path.rglob("__pycache__")] == []


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_a_module_under_a_private_name(folder):
    path = write(folder / "numpy.py", "VALUE = 3\nNAME = __name__\nFILE = __file__\n")
    found = import_file(path)
    assert found.module.VALUE == 3
    assert found.module.NAME in sys.modules
    assert str(path) == found.module.FILE
    assert sys.modules["numpy"] is not found.module
    assert found.digest == sha256(path.read_bytes()).hexdigest()


def test_the_same_file_is_imported_once_and_a_changed_one_anew(folder, monkeypatch):
    path = write(folder / "mine.py", "VALUE = 3\n")
    first = import_file(path)
    monkeypatch.chdir(folder)
    assert import_file(Path("mine.py")) is first
    write(path, "VALUE = 4\n")  # of the same size and, most likely, in the same second
    second = import_file(path)
    assert second.module.VALUE == 4
    assert second.digest != first.digest


def test_neighbours_are_importable_while_it_is_imported_and_part_of_its_digest(folder):
    path = write(folder / "mine.py", "import helpers\nfrom inner.deep import DEEP\nVALUE = helpers.VALUE + DEEP\n")
    write(folder / "helpers.py", "VALUE = 3\n")
    write(folder / "inner/__init__.py", "")
    write(folder / "inner/deep.py", "DEEP = 10\n")
    first = import_file(path)
    assert first.module.VALUE == 13
    assert len(first.neighbours) == 3
    write(folder / "helpers.py", "VALUE = 4\n")
    second = import_file(path)
    assert second.module.VALUE == 14
    assert second.digest != first.digest


def test_what_moves_from_one_neighbour_to_the_next_changes_the_digest(folder):
    path = write(folder / "mine.py", "import a, b\n")
    write(folder / "a.py", "A = 1\nB = 1\n")
    write(folder / "b.py", "C = 1\n")
    before = import_file(path).digest
    write(folder / "a.py", "A = 1\n")
    write(folder / "b.py", "B = 1\nC = 1\n")
    assert import_file(path).digest != before


def test_a_neighbour_without_an_init_file_is_a_neighbour(folder):
    path = write(folder / "mine.py", "from plain.deep import DEEP\n")
    write(folder / "plain/deep.py", "DEEP = 10\n")
    assert import_file(path).neighbours == (folder / "plain/deep.py",)


def test_two_folders_may_have_neighbours_of_one_name(folder):
    for number in (1, 2):
        write(folder / f"of{number}/helpers.py", f"VALUE = {number}\n")
        path = write(folder / f"of{number}/mine.py", "from helpers import VALUE\n")
        assert number == import_file(path).module.VALUE


def test_what_was_imported_before_stays(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    write(folder / "shared_helpers.py", "VALUE = 1\n")
    path = write(folder / "mine.py", "import shared_helpers\nimport kvaudit.policies\nMODULE = shared_helpers\n")
    sys.dont_write_bytecode = True
    import shared_helpers

    sys.dont_write_bytecode = False
    try:
        assert import_file(path).module.MODULE is shared_helpers
        assert sys.modules["shared_helpers"] is shared_helpers
    finally:
        del sys.modules["shared_helpers"]


def test_a_path_that_the_file_adds_is_not_left(folder):
    import_file(write(folder / "mine.py", "import sys\nsys.path.append('/nowhere')\nsys.path.insert(0, '/nowhere')\n"))


OF_NULL_BYTES = "SyntaxError" if sys.version_info >= (3, 11, 4) else "ValueError"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n\nimport nowhere_to_be_found\n", "ModuleNotFoundError: No module named 'nowhere_to_be_found' (line 3)"),
        ("def f(:\n", "SyntaxError: invalid syntax (line 1)"),
        ("x = 1\nraise SystemExit(3)\n", "SystemExit: 3 (line 2)"),
        ("import sys\nsys.exit()\n", "SystemExit (line 2)"),
        ("def f():\n    raise ValueError('many\\nlines')\nf()\n", "ValueError: many lines (line 2)"),
        ("import helpers\n", "ZeroDivisionError: division by zero (line 1)"),
        ("\0", f"{OF_NULL_BYTES}: source code string cannot contain null bytes"),
        ("# coding: nonsense\n", "SyntaxError: unknown encoding: nonsense (line 0)"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line_with_the_file_and_the_error(folder, source, said):
    path = write(folder / "mine.py", source)
    write(folder / "helpers.py", "1 / 0\n")
    modules = set(sys.modules)
    with pytest.raises(PluginError) as refused:
        import_file(path)
    assert refused.value.message == f"{path} cannot be imported: {said}"
    assert set(sys.modules) == modules


def test_no_file_and_a_folder_are_told_apart(folder):
    with pytest.raises(UsageError, match=r"there is no file .*mine.py"):
        import_file(folder / "mine.py")
    (folder / "mine.py").mkdir()
    with pytest.raises(UsageError, match=r"mine.py cannot be read: Is a directory"):
        import_file(folder / "mine.py")
