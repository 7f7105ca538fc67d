"""A policy out of a file on disk that belongs to no package.

The file runs under a private module name, from the bytes that its digest covers. While it is imported its folder
stands first on the import path, so that it can import its neighbours at its top; afterwards neither the folder nor the
neighbours are left for others to find, and two folders may both have a `helpers.py`. A neighbour that is first
imported inside `select` is not found any more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import invalidate_caches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from kvaudit.errors import PluginError, UsageError
from kvaudit.policy_specs.sources import digest_of


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """An imported file. `digest` is SHA-256 over it and over the `neighbours` that it imported out of its folder."""

    module: ModuleType
    neighbours: tuple[Path, ...]
    digest: str


_IMPORTED: dict[Path, PolicyFile] = {}


def import_file(path: Path) -> PolicyFile:
    """The file as a module, imported once as long as neither it nor a neighbour changes.

    Raises UsageError for a file that cannot be read and PluginError, with the line, for one that cannot be imported.
    """
    try:
        source = path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}", "give the file in which the policy is written") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    place = path.resolve()
    held = _IMPORTED.get(place)
    if held is None or held.digest != digest_of(source, held.neighbours, path.parent):
        held = _IMPORTED[place] = _imported(place, source)
    return held


def _imported(path: Path, source: bytes) -> PolicyFile:
    name = f"_kvaudit_policy_{sha256(os.fsencode(path)).hexdigest()[:16]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None, "its name ends in .py"
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there for the names in annotations
    try:
        with _importable(path.parent) as found:
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(
            f"{path} cannot be imported: {_said(error, path)}", "mend it, or install what it needs"
        ) from error
    neighbours = tuple(sorted(found))
    return PolicyFile(module, neighbours, digest_of(source, neighbours, path.parent))


@contextmanager
def _importable(folder: Path) -> Iterator[set[Path]]:
    """The folder on the import path. In the end the set holds the files of the modules that were found in it."""
    modules, path, bytecode = set(sys.modules), list(sys.path), sys.dont_write_bytecode
    files = set[Path]()
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    invalidate_caches()
    try:
        yield files
    finally:
        sys.path[:], sys.dont_write_bytecode = path, bytecode
        new = {name.partition(".")[0] for name in sys.modules} - modules
        neighbours = {name for name in new if name in sys.modules and _lies_in(folder, sys.modules[name])}
        for name in [name for name in sys.modules if name.partition(".")[0] in neighbours]:
            file = getattr(sys.modules.pop(name), "__file__", None)
            files |= {Path(file)} if file else set()


def _lies_in(folder: Path, module: ModuleType) -> bool:
    """Whether a top-level module was found in the folder itself, and not in an environment below it."""
    file, places = getattr(module, "__file__", None), getattr(module, "__path__", ())
    return folder in {Path(place).parent for place in places} or (file is not None and Path(file).parent == folder)


def _said(error: BaseException, path: Path) -> str:
    """The error in one line, with the line of the file that it came through."""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    reason = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return f"{what} (line {line})" if line is not None else what
