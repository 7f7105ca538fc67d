"""Reading a run: its manifest, its arms and its tables, and nothing that is not whole and its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvaudit.errors import RunError
from kvaudit.records import CHRONOLOGICAL, FULL_PREFILL, Control
from kvaudit.schema import TABLES
from kvaudit.store.layout import ARM_TABLES, OBSERVATIONS, Stamp, check_arm, checked_rows, part_path, table_path
from kvaudit.store.manifest import FINISHED, read_manifest


@dataclass(frozen=True, slots=True)
class PlannedArm:
    """An arm of a run, and whether all its observations are there."""

    arm_id: str
    policy: str
    order: str
    order_seed: int | None
    control: Control
    finished: bool


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder. Tables are read when they are asked for, each checked against the manifest's digests."""

    path: Path
    manifest: Mapping[str, Any]

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.manifest["trace"]["digest"], self.manifest["settings_digest"])

    def arms(self) -> tuple[PlannedArm, ...]:
        """Every planned arm, in the order in which they run. Raises RunError for a damaged or foreign part."""
        return tuple(PlannedArm(**arm, finished=self._finished(arm["arm_id"])) for arm in self.manifest["arms"])

    def table(self, name: str) -> pa.Table:
        """A table with its schema in `schema.TABLES`; of arm tables the finished arms' parts, in the order of arms.

        Raises RunError, naming the file, when one is missing, empty, cut off, another run's or of another schema.
        """
        return pa.concat_tables([TABLES[name].empty_table(), *(part for _, part in self.parts(name))])

    def parts(self, name: str) -> Iterator[tuple[str, pa.Table]]:
        """A table's parts, one at a time, with their places in the folder (`observations/ARM.parquet`)."""
        if name in ARM_TABLES:
            paths = [part_path(self.path, name, arm.arm_id) for arm in self.arms() if arm.finished]
        else:
            paths = [table_path(self.path, name)]
        for path in paths:
            yield path.relative_to(self.path).as_posix(), self._read(name, path)

    def part(self, name: str, arm_id: str) -> pa.Table:
        """One finished arm's part of a table; all of a table that has no parts."""
        path = part_path(self.path, name, arm_id) if name in ARM_TABLES else table_path(self.path, name)
        return self._read(name, path)

    def check(self) -> None:
        """Hold every file of the run against the manifest, by its footer, also those that nobody asked for yet.

        Raises RunError, naming the file, for one that is missing, cut off, another run's or another arm's.
        """
        requests = int(self.manifest["trace"]["requests"])
        arms = [arm.arm_id for arm in self.arms() if arm.finished]
        for arm_id in arms:
            for name in ARM_TABLES:
                path = part_path(self.path, name, arm_id)
                checked_rows(path, name, self.stamp)
                check_arm(path, arm_id)
        whole = {"requests": True, "references": f"{FULL_PREFILL}.{CHRONOLOGICAL}" in arms}
        whole |= dict.fromkeys(("comparisons", "summary"), self.manifest.get("status") == FINISHED)
        for name, must in whole.items():
            path = table_path(self.path, name)
            if not must and not path.exists():
                continue
            rows = checked_rows(path, name, self.stamp)
            # An engine that shows no log-probabilities leaves `references` empty.
            if (name == "requests" and rows != requests) or (name == "references" and rows not in (0, requests)):
                raise RunError(f"{path} has {rows} rows for {requests} requests", "replay into another folder")

    def provenance(self, arm_ids: Sequence[str], request_ids: Sequence[str]) -> pa.Table:
        """The rows of `provenance` for some requests in some finished arms, without reading the others."""
        wanted = pc.field("request_id").isin(list(request_ids))
        finished = {arm.arm_id for arm in self.arms() if arm.finished}
        parts = [
            self._read("provenance", part_path(self.path, "provenance", arm_id), wanted)
            for arm_id in dict.fromkeys(arm_ids)
            if arm_id in finished
        ]
        return pa.concat_tables([TABLES["provenance"].empty_table(), *parts])

    def _finished(self, arm_id: str) -> bool:
        path = part_path(self.path, OBSERVATIONS, arm_id)
        if not path.exists():
            return False
        rows, requests = checked_rows(path, OBSERVATIONS, self.stamp), self.manifest["trace"]["requests"]
        if rows != requests:
            raise RunError(f"{path} has {rows} rows for {requests} requests", "replay into another folder")
        return True

    def _read(self, name: str, path: Path, rows: pc.Expression | None = None) -> pa.Table:
        checked_rows(path, name, self.stamp)
        try:
            if rows is None:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    table = file.read()
            else:
                table = pq.read_table(path, partitioning=None, filters=rows, page_checksum_verification=True)
            return table.cast(TABLES[name])
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{path} is damaged: {error}", "replay the trace into another folder") from error


def open_run(path: Path | str) -> Run:
    """Raises RunError for a folder that is missing, no run, damaged, or of another schema version."""
    folder = Path(path)
    manifest = read_manifest(folder)
    try:
        for arm in manifest["arms"]:
            PlannedArm(**arm, finished=False)
        run = Run(folder, manifest)
        _ = run.stamp, int(manifest["trace"]["requests"])
    except (TypeError, KeyError, ValueError) as error:
        raise RunError(f"{folder}: the manifest is damaged: {error}", "replay the trace into another folder") from error
    return run
