"""Gates from `[tool.kvaudit.gates]` of pyproject.toml or `[gates]` of kvaudit.toml, and from the command line.

What is given on the command line overrides the file, key by key. A key that kvaudit does not know is an error, since a
gate that is misspelt would never fail.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvaudit.errors import UsageError

if TYPE_CHECKING:
    from kvaudit.analysis.gates import Gates

OWN_FILE = "kvaudit.toml"
PROJECT_FILE = "pyproject.toml"
LARGEST_FILE = 1 << 24
LARGEST_LIMIT = 1e9
"""Far above any share; what is larger may not even fit into a float."""
NON_INFERIOR_KEYS = ("policy", "than", "margin")


class Wanted(NamedTuple):
    """What a user holds a run to: limits, and the run to hold it against."""

    gates: Gates
    baseline: Path | None


def wanted_gates(file: Path | None, given: Mapping[str, Any], baseline: Path | None) -> Wanted:
    """The limits in force: those of `file`, or of the nearest gate file at or above the working directory, overridden
    by what is `given` on the command line (fields of `Gates`; None is not given).

    Raises UsageError for a file that cannot be read, sets no limit, or has a key that is not known or of another type.
    """
    from kvaudit.analysis.gates import Gates

    source = file or _nearest()
    table = {} if source is None else _gate_table(source)
    found = Gates() if source is None else replace(_gates(table, source), source=str(source))
    gates = replace(found, **{name: value for name, value in given.items() if value is not None})
    if source is not None and not gates.any:
        raise UsageError(f"{source} sets no limit", f"give one of {', '.join(_LIMITS)} or non-inferior")
    if gates.policies and not gates.per_policy:
        raise UsageError("--policy names the policies that limits hold, and no limit is set", "add --min-fidelity")
    return Wanted(gates, baseline or _baseline(table, source))


def non_inferiority(text: str) -> Any:
    """`POLICY,THAN,MARGIN`, as `--non-inferior` takes it; a policy's own parameters have commas between them too."""
    from kvaudit.analysis.gates import NonInferiority

    parts = re.split(r",(?![A-Za-z_]\w*=)", text)
    try:
        policy, than, margin = parts
        if not (policy and than):
            raise ValueError
        return NonInferiority(policy, than, float(margin))
    except ValueError as error:
        raise UsageError(
            f"--non-inferior {text!r} is not POLICY,THAN,MARGIN", "write document-aligned,token-topk,0.02"
        ) from error


def _nearest() -> Path | None:
    """The gate file of the nearest folder that has one. Two in one folder are an error: only one could be in force."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        with suppress(OSError):
            for name in os.listdir(folder):
                if name.lower() == OWN_FILE != name:
                    raise UsageError(f"{folder / name} would set no gates", f"rename it to {OWN_FILE}")
        own, project = folder / OWN_FILE, folder / PROJECT_FILE
        found = [own] if os.path.lexists(own) else []
        if project.is_file() and _means_kvaudit(_read(project), project):
            found.append(project)
        if len(found) > 1:
            raise UsageError(f"{found[0]} and {found[1].name} both set gates", "keep one of them")
        if found:
            return found[0]
    return None


def _means_kvaudit(content: Mapping[str, Any], path: Path) -> bool:
    """Whether a pyproject.toml sets gates. Raises UsageError for a table that was meant to and would not."""
    tables = content.get("tool")
    names = list(tables) if isinstance(tables, Mapping) else []
    near = [name for name in names if name != "kvaudit" and get_close_matches(name.lower(), ["kvaudit"], cutoff=0.85)]
    astray = [f"tool.{name}" for name in near] + [name for name in ("gates", "kvaudit") if name in content]
    others = content.get("tools")
    if isinstance(others, Mapping) and "kvaudit" in others:
        astray.append("tools.kvaudit")
    if astray:
        raise UsageError(f"{path}: {astray[0]!r} sets no gates", f"gates stand in {_HEADINGS[PROJECT_FILE]}")
    return "kvaudit" in names


def _gate_table(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = _read(path)
    place = "" if path.name != PROJECT_FILE else "tool.kvaudit."
    if path.name == PROJECT_FILE:
        content = _table(_table(content, "tool", path), "kvaudit", path)
    _refuse_unknown(content, ("gates",), place, path)
    return _table(content, "gates", path)


def _gates(table: Mapping[str, Any], path: Path) -> Gates:
    from kvaudit.analysis.gates import Gates, NonInferiority

    _refuse_unknown(table, (*_LIMITS, "policies", "non-inferior", "baseline"), "gates.", path)
    pairs = []
    for entry in _typed(table, "non-inferior", _is_list_of(dict), "a list of tables", path) or ():
        _refuse_unknown(entry, NON_INFERIOR_KEYS, "gates.non-inferior.", path)
        kinds = (_is_text, _is_text, _is_number)
        if not all(name in entry and kind(entry[name]) for name, kind in zip(NON_INFERIOR_KEYS, kinds, strict=True)):
            raise UsageError(
                f"{path}: an entry of non-inferior lacks a policy, than or margin",
                'write { policy = "document-aligned", than = "token-topk", margin = 0.02 }',
            )
        pairs.append(NonInferiority(entry["policy"], entry["than"], float(entry["margin"])))
    limits: dict[str, Any] = {}
    for key in _LIMITS:
        value = _typed(table, key, _is_number, "a number", path)
        limits[key.replace("-", "_")] = None if value is None else float(value)
    policies = _typed(table, "policies", _is_list_of(str), "a list of names", path)
    try:
        return Gates(policies=tuple(policies) if policies else None, non_inferior=tuple(pairs), **limits)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error


def _baseline(table: Mapping[str, Any], source: Path | None) -> Path | None:
    if source is None:
        return None
    baseline = _typed(table, "baseline", _is_text, "the path of a run", source)
    return None if baseline is None else source.parent / baseline


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise UsageError(f"{path} is no file that can be read", "name another file with --gates")
        if path.stat().st_size > LARGEST_FILE:
            raise UsageError(f"{path} is larger than any gate file", "name another file with --gates")
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", "name another file with --gates"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}", "mend it") from error


def _table(content: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    found = content.get(name)
    if not isinstance(found, Mapping):
        raise UsageError(f"{path} has no table of gates", f"write one under {_HEADINGS.get(path.name, '[gates]')}")
    return found


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], place: str, path: Path) -> None:
    for key in table:
        if key not in known:
            named = key if key.isascii() and key.isprintable() else ascii(key)
            raise UsageError(f"{path}: unknown key {place}{named}", f"known: {', '.join(known)}")


def _typed(table: Mapping[str, Any], key: str, fits: Callable[[Any], bool], what: str, path: Path) -> Any:
    value = table.get(key)
    if value is not None and not fits(value):
        raise UsageError(f"{path}: gates.{key} is {value!r}, not {what}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_LIMIT


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


_LIMITS = ("min-fidelity", "max-variation", "max-fidelity-drop", "max-variation-rise")
_HEADINGS = {PROJECT_FILE: "[tool.kvaudit.gates]", OWN_FILE: "[gates]"}
