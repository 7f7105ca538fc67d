"""Which file is where in a run folder, and how a Parquet footer says whose it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from kvaudit.errors import RunError
from kvaudit.schema import QUERIES, SCHEMA_VERSION, TABLES
from kvaudit.schema.footer import footer

MANIFEST = "manifest.json"
LOCK = ".kvaudit.lock"
TEMPORARY = ".tmp"
ENGINE_LOGS = "engine-logs"
"""The folder in a run for what engines with processes of their own write; it may be there before the manifest is."""
FORMAT = "kvaudit run"

OBSERVATIONS = "observations"
ARM_TABLES = ("selections", "provenance", "writes", "evictions", OBSERVATIONS)
"""Tables with a part for each arm. Observations come last: their part is the mark that the arm is finished."""
WHOLE_TABLES = tuple(name for name in TABLES if name not in ARM_TABLES)
TEXTS = (QUERIES,)
"""Texts that stand beside the tables."""

_AGAIN = "run the same `kvaudit replay` again to complete it"


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose a file is: what was replayed, and how."""

    trace_digest: str
    settings_digest: str

    def footer(self, table: str) -> dict[str, str]:
        return footer(table, self.trace_digest, self.settings_digest)


def part_path(folder: Path, table: str, arm_id: str) -> Path:
    return folder / table / f"{quote(arm_id, safe='')}.parquet"


def table_path(folder: Path, table: str) -> Path:
    return folder / f"{table}.parquet"


def checked_rows(path: Path, table: str, stamp: Stamp) -> int:
    """How many rows a file has. Raises RunError unless it is whole, this run's and in this version's schema."""
    try:
        footer = pq.read_metadata(path)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing", _AGAIN) from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except pa.ArrowException as error:
        what = "is empty" if path.stat().st_size == 0 else "is cut off or no Parquet file"
        raise RunError(f"{path} {what}", _AGAIN) from error
    _check_footer(path, footer, stamp.footer(table))
    _check_columns(path, footer.schema.to_arrow_schema(), TABLES[table])
    return int(footer.num_rows)


def check_arm(path: Path, arm_id: str) -> None:
    """Raises RunError for a part whose rows, by the footer's statistics, belong to another arm."""
    footer = pq.read_metadata(path)
    column = footer.schema.to_arrow_schema().get_field_index("arm_id")
    for group in range(footer.num_row_groups):
        found = footer.row_group(group).column(column).statistics
        if found is not None and found.has_min_max and not (found.min == found.max == arm_id):
            raise RunError(f"{path} holds rows of another arm: {found.min}", _AGAIN)


def check_schema_version(path: Path, version: object) -> None:
    if not (str(version).isascii() and str(version).isdigit()):
        raise RunError(f"{path} has no schema version that kvaudit knows: {version!r}")
    if int(str(version)) != SCHEMA_VERSION:
        age = "a newer" if int(str(version)) > SCHEMA_VERSION else "an older"
        raise RunError(
            f"{path} was written by {age} kvaudit (schema {version}, this one has schema {SCHEMA_VERSION})",
            "read it with that version, or replay the trace with this one",
        )


def _check_footer(path: Path, footer: pq.FileMetaData, expected: dict[str, str]) -> None:
    found = {key.decode(): value.decode(errors="replace") for key, value in (footer.metadata or {}).items()}
    if "kvaudit.schema_version" not in found:
        raise RunError(f"{path} was not written by kvaudit", "move it out of the run folder")
    check_schema_version(path, found["kvaudit.schema_version"])
    for key, value in expected.items():
        if found.get(key) != value:
            raise RunError(
                f"{path} belongs to another run: its {key.removeprefix('kvaudit.').replace('_', ' ')} is "
                f"{found.get(key)}, not {value}",
                "move it out of the run folder and run the same `kvaudit replay` again",
            )


def _check_columns(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if found.equals(expected):
        return
    wrong = sorted(set(found.names) ^ set(expected.names)) or [
        name for name in expected.names if not found.field(name).equals(expected.field(name))
    ]
    raise RunError(f"{path} has other columns than kvaudit writes: {', '.join(wrong or found.names)}", _AGAIN)
