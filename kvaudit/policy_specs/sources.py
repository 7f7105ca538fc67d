"""The digest of what a policy is written in: its own file and what it imports out of its own package."""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

_OF_EVERYBODY = frozenset({"site-packages", "dist-packages"})
"""Folders in which packages that have nothing to do with each other lie side by side."""
_IMPORTERS = frozenset({"import_module", "__import__"})


class _Source(NamedTuple):
    """A module's file and its full name's parts; those of a package with `__init__` for the last."""

    file: Path
    parts: tuple[str, ...]


def source_digest(loaded: Any) -> str | None:
    """SHA-256 over the file in which a class or function was written and over every module of the same package that is
    imported there, or in one of those, wherever in it the import stands.

    What lies beside the package, or beside a module that is in none, is covered too as far as it is imported, but not
    installed packages. Each imported file counts with its place below the folder of all, and its length.

    Not covered: data files, compiled modules, modules that are imported under a name that is computed, and those that
    are found in another folder. None where there is no file to read.
    """
    try:
        file = inspect.getsourcefile(loaded)
        if file is None:
            return None
        own = Path(file).resolve()
        content = own.read_bytes()
    except (TypeError, OSError):
        return None
    parts = _parts(own, loaded.__module__)
    others = sorted(_reached(own, parts) - {own})
    return digest_of(content, others, own.parents[len(parts) - 1])


def digest_of(content: bytes, others: Iterable[Path], folder: Path) -> str:
    """SHA-256 over a module and others, each with its place from `folder` on and its length. A module alone has that
    of its file; others that cannot be read are left out."""
    digest = sha256(content)
    for other in others:
        with suppress(OSError):
            held = other.read_bytes()
            place = Path(os.path.relpath(other, folder)).as_posix().encode("utf-8", "surrogateescape")
            # No Python source holds a zero byte: no two sets of files give the same bytes.
            digest.update(b"\0%s\0%d\0" % (place, len(held)) + held)
    return digest.hexdigest()


def _parts(file: Path, module: str) -> tuple[str, ...]:
    """A module's name in parts; the name of its file where it runs under another."""
    known = getattr(sys.modules.get(module), "__file__", None)
    parts = tuple(module.split(".")) if known and Path(known).resolve() == file else (file.stem,)
    return (*parts, "__init__") if file.stem == "__init__" else parts


def _reached(file: Path, parts: tuple[str, ...]) -> set[Path]:
    root = file.parents[len(parts) - 1]
    found, waiting = {file}, [_Source(file, parts)]
    while waiting:
        for names in _imported(waiting.pop()):
            if _belongs(root, parts, names[0]):
                new = [source for source in _modules(root, names) if source.file not in found]
                found |= {source.file for source in new}
                waiting += new
    return found


def _belongs(root: Path, parts: tuple[str, ...], name: str) -> bool:
    """Whether a top-level module or package is the policy's own: its package and what lies beside it. In a folder where
    everybody's packages lie: its package or, where it has none, the modules beside it."""
    if root.name not in _OF_EVERYBODY or name == parts[0]:
        return True
    return len(parts) == 1 and not (root / name).is_dir()


def _imported(source: _Source) -> Iterator[tuple[str, ...]]:
    """The full names that a module imports, each with what it takes out of it: that may be a module too."""
    try:
        statements = _import_statements(source.file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for level, module, names in statements:
        before = source.parts[:-level] if level else ()
        base = (*before, *module)
        for name in names:
            yield (*base, *name)


@lru_cache(maxsize=1024)
def _import_statements(source: bytes) -> tuple[tuple[int, tuple[str, ...], tuple[tuple[str, ...], ...]], ...]:
    """Each import anywhere in a module: its level, what it imports from, and the names."""
    found: list[tuple[int, tuple[str, ...], tuple[tuple[str, ...], ...]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.append((0, (), tuple(tuple(alias.name.split(".")) for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            found.append((node.level, module, tuple((alias.name,) for alias in node.names)))
        elif isinstance(node, ast.Call) and (name := _called_for(node)):
            parts = tuple(name.lstrip(".").split("."))
            if all(map(str.isidentifier, parts)):
                found.append((len(name) - len(name.lstrip(".")), (), (parts,)))
    return tuple(found)


def _called_for(call: ast.Call) -> str:
    """The module that `import_module` or `__import__` is called for, where the name stands there."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    given = call.args[0] if call.args and name in _IMPORTERS else None
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else ""


def _modules(root: Path, names: tuple[str, ...]) -> Iterator[_Source]:
    """The modules below `root` that importing this name runs: the packages on the way, and the module."""
    for length in range(1, len(names) + 1):
        place = root.joinpath(*names[:length])
        for file, parts in (
            (place / "__init__.py", (*names[:length], "__init__")),
            (place.with_suffix(".py"), names[:length]),
        ):
            if file.is_file():
                yield _Source(file, parts)
