"""Files that are either whole or not there: written under a temporary name, synced, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from kvaudit.errors import EngineError
from kvaudit.rows import Row
from kvaudit.schema import TABLES
from kvaudit.store.layout import ARM_TABLES, TEMPORARY, Stamp, part_path

_ROW_GROUP_BYTES = 4 * 2**20


@contextmanager
def named_refusals(path: Path) -> Iterator[None]:
    """Turn a failed write into one line that names the file and the system's reason."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise EngineError(
            f"cannot write {path}: {reason}", "finished arms are kept; the same command goes on from there"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    with named_refusals(path), _removed_on_failure(temporary):
        temporary.write_bytes(content)
        _commit(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class TableFile:
    """One Parquet file that grows row by row in bounded memory, and takes its name when it is whole."""

    def __init__(self, path: Path, table: str, stamp: Stamp) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._schema = TABLES[table]
        self._batches: list[pa.RecordBatch] = []
        self._bytes = 0
        with named_refusals(path):
            path.parent.mkdir(exist_ok=True)
            self._file = open(self._temporary, "wb")  # noqa: SIM115
        footer_schema = self._schema.with_metadata(stamp.footer(table))
        self._writer = pq.ParquetWriter(self._file, footer_schema, compression="zstd", write_page_checksum=True)

    def add(self, rows: Sequence[Row]) -> None:
        if rows:
            self.add_batch(pa.RecordBatch.from_pylist(list(rows), schema=self._schema))

    def add_batch(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= _ROW_GROUP_BYTES:
            with named_refusals(self.path):
                self._flush()

    def close(self) -> None:
        """Write what is left and sync. The file still has its temporary name."""
        with named_refusals(self.path):
            self._flush()
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def publish(self) -> None:
        with named_refusals(self.path):
            os.replace(self._temporary, self.path)

    def discard(self) -> None:
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        with suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._batches:
            table = pa.Table.from_batches(self._batches, schema=self._schema).combine_chunks()
            self._writer.write_table(table, row_group_size=table.num_rows)
            self._batches, self._bytes = [], 0


class PartFiles:
    """The files of one arm (and, beside them, tables that belong to it). All take their names at the end, the last
    of them the observations; after an error none does."""

    def __init__(self, folder: Path, arm_id: str, stamp: Stamp, beside: Mapping[str, Path]) -> None:
        paths = {**beside, **{table: part_path(folder, table, arm_id) for table in ARM_TABLES}}
        self._files: dict[str, TableFile] = {}
        try:
            for table, path in paths.items():
                self._files[table] = TableFile(path, table, stamp)
        except BaseException:
            self._discard()
            raise

    def add(self, table: str, rows: Sequence[Row]) -> None:
        self._files[table].add(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._publish()
            except BaseException:
                self._discard()
                raise
        else:
            self._discard()

    def _publish(self) -> None:
        for file in self._files.values():
            file.close()
        *files, mark = self._files.values()
        for file in files:
            file.publish()
        for folder in {file.path.parent for file in files}:
            sync_folder(folder)
        mark.publish()
        sync_folder(mark.path.parent)

    def _discard(self) -> None:
        for file in self._files.values():
            file.discard()


def write_table(path: Path, table: str, stamp: Stamp, batches: Iterable[pa.RecordBatch | Sequence[Row]]) -> None:
    """A whole table, batch by batch."""
    file = TableFile(path, table, stamp)
    try:
        for batch in batches:
            file.add_batch(batch) if isinstance(batch, pa.RecordBatch) else file.add(batch)
        file.close()
        file.publish()
    except BaseException:
        file.discard()
        raise
    sync_folder(path.parent)


@contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _commit(temporary: Path, path: Path) -> None:
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
