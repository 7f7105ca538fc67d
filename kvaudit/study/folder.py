"""The folder of a study: study.json, a lock, and a run folder for each cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from kvaudit import __version__
from kvaudit.engines import Engine, Switches, description
from kvaudit.errors import RunError
from kvaudit.plan import Plan
from kvaudit.records import Trace
from kvaudit.schema import SCHEMA_VERSION
from kvaudit.store import new_manifest, remove_run
from kvaudit.store.holding import ELSEWHERE, check_same_engine, held
from kvaudit.store.layout import MANIFEST, check_schema_version
from kvaudit.store.manifest import engine_facts
from kvaudit.store.writing import write_bytes
from kvaudit.study.content import damaged_names, foreign_names
from kvaudit.study.grid import RATIO, Cell, StudyGrid

FORMAT = "kvaudit study"
STUDY = "study.json"
CELLS = "cells"
VARYING = frozenset({"switches", RATIO})
"""What an engine says of itself that differs from cell to cell."""

Described = dict[str, Any]
_RESTORE = "restore it, or run the study into another folder"


class StudyFolder:
    """A study's folder that this process writes to. Nothing in it changes before `begin`."""

    def __init__(self, path: Path, described: Described, replaced: Described | None) -> None:
        self.path, self.described, self._replaced = path, described, replaced
        self.replacing = replaced is not None

    def cell(self, name: str) -> Path:
        return cell_path(self.path, name)

    def begin(self, engine: Engine, opened: str) -> None:
        """Make the folder ready, for the first cell and for each that follows; `opened` is the cell that is held: it is
        refused no longer, and what failed in it is tried again.

        Raises RunError when another engine than this began the study: cells would not be comparable.
        """
        facts = {name: value for name, value in engine_facts(description(engine)).items() if name not in VARYING}
        check_same_engine(self.path, self.described["engine"], facts)
        outdated = [self.described[told].pop(opened, None) for told in ("refused", "failed")]
        if self.described["engine"] is None:
            if self._replaced is not None:
                self._remove_cells(self._replaced, but=opened)
            self.described["engine"] = facts
            self._write()
        elif any(outdated):
            self._write()

    def refuse(self, cell: str, why: str) -> None:
        """Keep why the engine does not open with a cell's switches."""
        if self.described["refused"].get(cell) != why:
            self.described["refused"][cell] = why
            if self.described["engine"] is not None:
                self._write()

    def set_failed(self, cell: str, why: Mapping[str, str]) -> None:
        """Keep which policies failed in a cell, and with what error; without any, that none does any more."""
        if self.described["failed"].get(cell, {}) != why:
            self.described["failed"] |= {cell: dict(why)}
            self._write()

    def set_max_noise(self, limit: float) -> None:
        """The noise floor's limit may change from one replay to the next: no answer depends on it."""
        if self.described["max_noise"] != limit:
            self.described["max_noise"] = limit
            self._write()

    def _remove_cells(self, described: Described, but: str) -> None:
        """Take away every cell of a replaced study but one, so that none is taken for the new study's."""
        for cell in described["cells"]:
            folder = self.cell(cell["name"])
            if cell["name"] != but and (folder / MANIFEST).exists():
                remove_run(folder)

    def _write(self) -> None:
        content = orjson.dumps(self.described, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_bytes(self.path / STUDY, content)


def cell_path(study: Path, name: str) -> Path:
    return study / CELLS / name


def is_study(path: Path) -> bool:
    return (path / STUDY).is_file()


def new_study(trace: Trace, grid: StudyGrid, plans: Mapping[str, Plan], max_noise: float) -> Described:
    """What study.json says of a study that begins. `plans` are those of the cells, by name.

    `settings` are those that all cells share.
    """
    manifests = {name: new_manifest(trace, plan, max_noise) for name, plan in plans.items()}
    cells = [_described(cell, plans[cell.name], manifests[cell.name]["settings_digest"]) for cell in grid.cells]
    first = manifests[grid.cells[0].name]
    apart = {"policies", "policy_sources", "max_noise", "switches", *grid.axes}
    switches = {name: value for name, value in first["settings"]["switches"].items() if name not in grid.axes}
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kvaudit_version": __version__,
        "created": first["created"],
        "kind": grid.kind,
        "study_digest": _digest(__version__, SCHEMA_VERSION, trace.digest, grid.kind, cells),
        "trace": first["trace"],
        "settings": {name: value for name, value in first["settings"].items() if name not in apart}
        | {"switches": switches},
        "max_noise": max_noise,
        "axes": {axis: list(values) for axis, values in grid.axes.items()},
        "cells": cells,
        "same": [asdict(same) for same in grid.same],
        "skipped": [asdict(skipped) for skipped in grid.skipped],
        "refused": {},
        "failed": {},
        "engine": None,
    }


def cell_of(described: Mapping[str, Any]) -> Cell:
    """A cell as study.json has it."""
    return Cell(
        described["name"],
        float(described[RATIO]),
        Switches(**described["switches"]),
        tuple(described["policies"]),
    )


def read_study(path: Path) -> Described:
    """Raises RunError for a folder that is no study of this schema version."""
    file = path / STUDY
    try:
        found = orjson.loads(file.read_bytes())
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise RunError(f"{file} is damaged: {error}", "run the study into another folder") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RunError(f"{file} is not kvaudit's", "give the folder that `kvaudit replay --study` printed")
    check_schema_version(file, found.get("schema_version"))
    if damaged := damaged_names(found):
        raise RunError(f"{file} is damaged: {', '.join(damaged)} missing or of another type", _RESTORE)
    try:
        digest = _digest(
            found["kvaudit_version"], found["schema_version"], found["trace"]["digest"], found["kind"], found["cells"]
        )
        for cell in found["cells"]:
            cell_of(cell)
    except (TypeError, ValueError) as error:
        raise RunError(f"{file} is damaged: {error!r}", "run the study into another folder") from error
    if digest != found["study_digest"]:
        raise RunError(f"{file} was changed: its trace or cells are not those that were studied", _RESTORE)
    if foreign := foreign_names(found):
        raise RunError(f"{file} was changed: it tells of {', '.join(foreign)}, which the study does not have", _RESTORE)
    return found


def check_untold(path: Path, described: Mapping[str, Any], cell: str) -> None:
    """Raises RunError where study.json says of a finished cell that the engine refused it or that a policy failed."""
    for told in ("refused", "failed"):
        if described[told].get(cell):
            raise RunError(f"{path / STUDY} was changed: it has {cell} among {told}, and that is finished", _RESTORE)


@contextmanager
def open_study(path: Path, described: Described, *, force: bool = False) -> Iterator[StudyFolder]:
    """Hold a folder for a study, against every other process. The same study goes on where it stopped.

    Raises RunError when the folder holds something else: another study (unless `force`) or anything that is none.
    """
    with held(path, STUDY, read_study, writer="study", holds="study", below=CELLS):
        yield _claimed(path, described, force)


def _claimed(path: Path, described: Described, force: bool) -> StudyFolder:
    if not is_study(path):
        return StudyFolder(path, described, None)
    found = read_study(path)
    if force:
        return StudyFolder(path, described, found)
    if found["study_digest"] != described["study_digest"]:
        raise RunError(
            f"{path} holds another study, of {found['trace'].get('source')} (changed: {_changed(found, described)})",
            f"{ELSEWHERE}, or --force to replace it",
        )
    return StudyFolder(path, found, None)


def _changed(held: Described, wanted: Described) -> str:
    names = [name for name in ("kind", "axes") if held[name] != wanted[name]]
    names += [name for name, value in wanted["settings"].items() if value != held["settings"].get(name)]
    names += ["trace"] if held["trace"]["digest"] != wanted["trace"]["digest"] else []
    policies = [{policy for cell in study["cells"] for policy in cell["policies"]} for study in (held, wanted)]
    names += ["policies"] if policies[0] != policies[1] else []
    return ", ".join(name.replace("_", " ") for name in names) or "a policy's source or kvaudit's version"


def _described(cell: Cell, plan: Plan, digest: str) -> dict[str, Any]:
    return {
        "name": cell.name,
        RATIO: cell.recompute_ratio,
        "switches": asdict(cell.switches),
        "policies": list(plan.policies),
        "settings_digest": digest,
    }


def _digest(version: str, schema: int, trace: str, kind: str, cells: Sequence[Mapping[str, Any]]) -> str:
    identity = {"kvaudit": version, "schema": schema, "trace": trace, "kind": kind, "cells": list(cells)}
    return sha256(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS)).hexdigest()
