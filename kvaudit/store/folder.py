"""Claiming a folder for a replay: a new one, one to go on in, or, when forced, one to replace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from kvaudit.errors import RunError
from kvaudit.records import CHRONOLOGICAL, FULL_PREFILL, Arm
from kvaudit.rows import Row
from kvaudit.store.holding import ELSEWHERE, check_same_engine, held, refusals
from kvaudit.store.layout import (
    ARM_TABLES,
    ENGINE_LOGS,
    LOCK,
    MANIFEST,
    OBSERVATIONS,
    TEMPORARY,
    TEXTS,
    WHOLE_TABLES,
    checked_rows,
    part_path,
    table_path,
)
from kvaudit.store.manifest import (
    FINISHED,
    LIMITS,
    UNFINISHED,
    Manifest,
    engine_facts,
    limits,
    manifest_bytes,
    now,
    read_manifest,
)
from kvaudit.store.reading import Run
from kvaudit.store.references import References
from kvaudit.store.writing import PartFiles, write_bytes, write_table

_REFERENCE_ARM = f"{FULL_PREFILL}.{CHRONOLOGICAL}"


class RunFolder:
    """A run folder that this process writes to. Nothing in it changes before `begin`."""

    def __init__(self, path: Path, manifest: Manifest, replaced: Manifest | None, *, resumed: bool) -> None:
        self.path = path
        self.manifest = manifest
        self._replaced = replaced
        self._resumed = resumed
        self.finished = self._finished_arms() if resumed else frozenset[str]()

    @property
    def run(self) -> Run:
        return Run(self.path, self.manifest)

    def begin(self, engine: Mapping[str, object]) -> None:
        """Make the folder ready for arms. Raises RunError when another engine than this began the run."""
        facts = engine_facts(engine)
        check_same_engine(self.path, self.manifest["engine"], facts)
        self._make_ready()
        self.manifest |= {"engine": facts, "status": UNFINISHED, "finished": None}
        self._write_manifest()

    def adopt(self, source: Run, arm_ids: Iterable[str]) -> None:
        """Take over finished arms of another run of the same trace, in which they came out as they would here.

        They count as finished. The manifest's `shared` says where each was measured: a copy is no second measurement.
        """
        missing = [arm_id for arm_id in arm_ids if arm_id not in self.finished]
        if not missing:
            return
        self._make_ready()
        origin = {"settings_digest": source.manifest["settings_digest"], "folder": source.path.name}
        self.manifest["shared"] = self.manifest.get("shared", {}) | dict.fromkeys(missing, origin)
        self._write_manifest()
        for arm_id in missing:
            with self._parts(arm_id) as parts:
                for table in (*(("references",) if arm_id == _REFERENCE_ARM else ()), *ARM_TABLES):
                    for batch in source.part(table, arm_id).to_batches():
                        parts.add(table, batch.to_pylist())
            self.finished |= {arm_id}

    def arm(self, arm: Arm) -> PartFiles:
        """The arm's tables; with full prefill also the references that later arms are held against."""
        return self._parts(arm.arm_id)

    def references(self) -> References:
        return References(self.run)

    def write_table(self, name: str, batches: Iterable[pa.RecordBatch | Sequence[Row]]) -> None:
        write_table(table_path(self.path, name), name, self.run.stamp, batches)

    def write_text(self, name: str, text: str) -> None:
        """A text of `layout.TEXTS`, beside the tables."""
        write_bytes(self.path / name, text.encode())

    def take_stock(self) -> None:
        """Count the arms that this process finished among `finished`."""
        self.finished = self._finished_arms()

    def finish(self) -> None:
        """Say in the manifest that every arm is there, if it is."""
        if self.manifest["status"] != FINISHED and all(arm.finished for arm in self.run.arms()):
            self.manifest |= {"status": FINISHED, "finished": now()}
            self._write_manifest()

    def set_limits(self, max_noise: float, max_retried: float | None = None) -> None:
        """Limits may change from one replay to the next: no answer depends on them."""
        settings, wanted = self.manifest["settings"], limits(max_noise, max_retried)
        if any(settings.get(name) != limit for name, limit in wanted.items()):
            settings |= wanted
            self._write_manifest()

    def remove_temporary_files(self) -> None:
        """What a killed replay left, and what an interrupt left that struck between a file's opening and anyone's
        knowing of it."""
        for file in (self.path / MANIFEST, *_files(self.path, self.manifest)):
            file.with_name(file.name + TEMPORARY).unlink(missing_ok=True)

    def _parts(self, arm_id: str) -> PartFiles:
        beside = {"references": table_path(self.path, "references")} if arm_id == _REFERENCE_ARM else {}
        return PartFiles(self.path, arm_id, self.run.stamp, beside)

    def _make_ready(self) -> None:
        """Take away, once, what a replaced run or a cut-off arm left."""
        with refusals(self.path):
            if self._replaced is not None:
                _remove_files(self.path, self._replaced)
                self._replaced = None
            if self._resumed:
                self._remove_marks()

    def _write_manifest(self) -> None:
        write_bytes(self.path / MANIFEST, manifest_bytes(self.manifest))

    def _finished_arms(self) -> frozenset[str]:
        """Arms that earlier replays finished. Without full prefill none counts: the others were held against it."""
        finished = {arm["arm_id"] for arm in self.manifest["arms"] if self._is_finished(arm["arm_id"])}
        return frozenset(finished if _REFERENCE_ARM in finished else ())

    def _is_finished(self, arm_id: str) -> bool:
        stamp, requests = self.run.stamp, self.manifest["trace"]["requests"]
        try:
            for table in ARM_TABLES:
                rows = checked_rows(part_path(self.path, table, arm_id), table, stamp)
            if arm_id == _REFERENCE_ARM:
                checked_rows(table_path(self.path, "references"), "references", stamp)
        except RunError:
            return False
        return rows == int(requests)

    def _remove_marks(self) -> None:
        """No arm that will run anew may look finished before it is."""
        for arm in self.manifest["arms"]:
            if arm["arm_id"] not in self.finished:
                part_path(self.path, OBSERVATIONS, arm["arm_id"]).unlink(missing_ok=True)


@contextmanager
def open_folder(path: Path, manifest: Manifest, *, force: bool = False) -> Iterator[RunFolder]:
    """Hold a folder for the run that `manifest` describes, against every other process.

    The same settings go on where an earlier replay stopped. Raises RunError when the folder holds something else:
    another audit of which an arm is finished (unless `force`, which replaces what kvaudit wrote there) or anything that
    is no audit.
    """
    with held(path, MANIFEST, read_manifest, writer="replay", holds="audit"):
        folder = _claimed(path, manifest, force)
        try:
            yield folder
        finally:
            folder.remove_temporary_files()


def _claimed(path: Path, manifest: Manifest, force: bool) -> RunFolder:
    if not (path / MANIFEST).exists():
        return RunFolder(path, manifest, None, resumed=False)
    found = read_manifest(path)
    if force:
        return RunFolder(path, manifest, found, resumed=False)
    if found["settings_digest"] != manifest["settings_digest"]:
        if not RunFolder(path, found, None, resumed=True).finished:
            return RunFolder(path, manifest, found, resumed=False)
        raise RunError(
            f"{path} holds another audit, of {found['trace'].get('source')} (changed: {_changed(found, manifest)})",
            f"{ELSEWHERE}, or --force to replace it",
        )
    return RunFolder(path, found, None, resumed=True)


def _changed(held: Manifest, wanted: Manifest) -> str:
    """What two audits differ in, by the manifest's names."""
    before, after = held["settings"], wanted["settings"]
    names = [name for name in after if name not in LIMITS and after[name] != before.get(name)]
    if held["trace"].get("digest") != wanted["trace"]["digest"]:
        names.append("trace")
    return ", ".join(name.replace("_", " ") for name in names) or "kvaudit's version"


def remove_run(path: Path) -> None:
    """Take away all that a run wrote into a folder, and the folder where nothing else is in it."""
    with refusals(path):
        _remove_files(path, read_manifest(path))
        for log in (path / ENGINE_LOGS).glob("*.log"):
            log.unlink()
        with suppress(OSError):
            (path / ENGINE_LOGS).rmdir()
        for name in (MANIFEST, LOCK):
            (path / name).unlink(missing_ok=True)
        with suppress(OSError):
            path.rmdir()


def _remove_files(path: Path, manifest: Manifest) -> None:
    """All that a run wrote but its manifest, which makes the folder a run until the next one takes its place."""
    for file in _files(path, manifest):
        file.unlink(missing_ok=True)
        file.with_name(file.name + TEMPORARY).unlink(missing_ok=True)
    for table in ARM_TABLES:
        with suppress(OSError):
            (path / table).rmdir()


def _files(path: Path, manifest: Manifest) -> Iterator[Path]:
    """Each arm's observations before its other parts: no arm looks finished while they go."""
    for arm in manifest["arms"]:
        for table in reversed(ARM_TABLES):
            yield part_path(path, table, arm["arm_id"])
    for table in WHOLE_TABLES:
        yield table_path(path, table)
    for name in TEXTS:
        yield path / name
